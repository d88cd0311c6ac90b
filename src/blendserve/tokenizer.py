"""Text to token ids and back: chat template, batched encoding, incremental detokenisation."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from blendserve.errors import ModelError, RequestError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Arguments of the rendering call, not variables of the template: a request may not set them through
# chat_template_kwargs. A `chat_template` of the request's own would be code to run.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)


class TextStream(Protocol):
    """Turns the tokens of one output into text as they come; pushes and flush join to the full decode."""

    def push(self, token_id: int) -> str:
        """Text that this token made final; "" for a skipped token or inside a character of several tokens."""
        ...

    def flush(self) -> str:
        """Text still held back after the last token, such as an incomplete character."""
        ...


class Tokenizer:
    """The tokenizer of a Hugging Face model folder; with `trust_remote_code` its own code may read it.

    Raises:
        ModelError: The folder has no tokenizer, or only a slow one without a Rust backend.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        try:
            loader = _tokenizer_class(folder)
        except ImportError as error:
            raise ModelError(
                f'tokenizing needs transformers ({error}): pip install "blendserve[native]"'
            ) from error
        try:
            self._tokenizer = loader.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        # transformers raises what it likes here, and tokenizers raises bare Exception.
        except Exception as error:
            raise ModelError(
                f"cannot load a tokenizer from {str(folder)!r} ({type(error).__name__}: {error}); "
                "the model folder needs tokenizer.json and tokenizer_config.json, "
                "and --trust-remote-code where code in the folder is to read them"
            ) from error
        if not self._tokenizer.is_fast:
            raise ModelError(f"the tokenizer in {str(folder)!r} has no fast version; add a tokenizer.json")

        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        self._token_kind = _token_kind(self._backend.decoder)
        self._token_bytes: dict[int, bytes | None] = {}
        added: dict[int, Any] = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens = frozenset(map(str, self._tokenizer.all_special_tokens)) - {""}
        """those that the tokenizer has names for, or lists as further ones"""
        self._takes_parts: dict[str, bool] = {}

        config = _read_json(folder / "config.json")
        self.vocab_size = int(config.get("vocab_size") or max(self._backend.get_vocab().values()) + 1)
        """ids the model has embeddings for; where those are padded, more than the tokenizer has tokens"""
        self.eos_token_ids = frozenset(
            _ids(config.get("eos_token_id"))
            + _ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
            + _ids(self._tokenizer.eos_token_id)
        )
        """tokens that end an output: those of the model's configs and the tokenizer's own"""

    @property
    def transformers(self) -> Any:
        """The tokenizer as transformers has it."""
        return self._tokenizer

    @property
    def definition(self) -> tuple[str, int]:
        """The text of its tokenizer.json, with all added tokens, and one more than its highest token id."""
        return self._backend.to_str(), max(self._backend.get_vocab().values()) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; add no special tokens to a rendered chat, its template wrote them already."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, over all cores."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that the model's chat template makes of messages; encode it without special tokens.

        A content is a string or a list of parts of type text; the template gets parts if it takes them, else their
        texts joined by line feeds. Where it knows no developers, their messages are the system's, and all of that are
        the first message.

        Raises:
            RequestError: There is no template, or it cannot render these messages.
        """
        from jinja2 import TemplateError

        kwargs = dict(chat_template_kwargs or {})
        if reserved := sorted(_RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
            raise RequestError(
                "invalid_request",
                f"chat_template_kwargs cannot set {', '.join(reserved)}; pass variables of the template only",
                param="chat_template_kwargs",
            )
        if not self._tokenizer.chat_template:
            raise RequestError(
                "invalid_request",
                "the model has no chat template; send a `prompt` to /v1/completions, "
                "or add chat_template.jinja to the model folder",
                param="messages",
            )
        try:
            template = self._tokenizer.get_chat_template(None, tools=tools)
            prompt: str = self._tokenizer.apply_chat_template(
                [
                    {**message, "content": self._content(message, template)}
                    for message in _known_roles(messages, template)
                ],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **kwargs,
            )
        # A template is code of the model's that runs on data of the user's.
        except (
            *(TemplateError, ArithmeticError, AttributeError, LookupError),
            *(TypeError, ValueError, RecursionError),
        ) as error:
            raise RequestError(
                "invalid_request",
                f"the model's chat template cannot render these messages ({type(error).__name__}: {error}); "
                "check that it knows their roles and their order, and that every content is a string",
                param="messages",
            ) from error
        return prompt

    def _content(self, message: Mapping[str, Any], template: str) -> Any:
        """What the template gets as the content of a message. Source: vLLM's HfRenderer."""
        content = message["content"]
        if message["role"] == "tool" or not self._template_takes_parts(template):
            return _joined(content)
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if content else []
        return content

    def _template_takes_parts(self, template: str) -> bool:
        """Whether a template writes the texts of a list of parts; found out by asking it to."""
        if template not in self._takes_parts:
            parts = [{"type": "text", "text": "PART-ONE"}, {"type": "text", "text": "PART-TWO"}]
            try:
                prompt = self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": parts}], chat_template=template, tokenize=False
                )
            except Exception:  # whatever templates and their filters raise
                prompt = ""
            takes = (
                "PART-ONE" in prompt
                and "PART-TWO" in prompt
                and "'text'" not in prompt
                and '"text"' not in prompt
            )
            self._takes_parts[template] = takes
        return self._takes_parts[template]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens without any clean-up of spaces; unknown ids give nothing."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """Id of a token, by its text; None if it is none of the vocabulary's."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """An incremental `decode` for one output."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if self._token_kind == "byte_level":
            return _ByteStream(self, skipped)
        return _WindowStream(self, skipped)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of a token, which may be part of a character; None where the vocabulary does not say."""
        try:
            return self._token_bytes[token_id]
        except KeyError:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            found = None if token is None else _bytes_of_token(token, self._token_kind)
            self._token_bytes[token_id] = found
            return found

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, special ones included, with its leading space where that is known."""
        known = self.token_bytes(token_id)
        return (
            self.decode([token_id], skip_special_tokens=False)
            if known is None
            else known.decode(errors="replace")
        )


class ApproximateTokenizer:
    """Four bytes of UTF-8 are a token: for planning where the model's own tokenizer is not at hand.

    Texts with a common prefix have it in their tokens, too, which is what planning needs.
    """

    vocab_size = 1 << 32
    eos_token_ids: frozenset[int] = frozenset()

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:  # noqa: ARG002
        """Tokens of each text."""
        return [self._encode(text.encode()) for text in texts]

    @staticmethod
    def _encode(text: bytes) -> list[int]:
        padded = text + b"\0" * (-len(text) % 4)
        tokens: list[int] = np.frombuffer(padded, dtype="<u4").tolist()
        return tokens

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,  # noqa: ARG002
        continue_final_message: bool = False,  # noqa: ARG002
        chat_template_kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> str:
        """The messages as JSON; the model has a template of its own."""
        return json.dumps([*(tools or ()), *messages], ensure_ascii=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their bytes as text."""
        return b"".join(token_id.to_bytes(4, "little") for token_id in token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """The four bytes."""
        return token_id.to_bytes(4, "little")

    def token_text(self, token_id: int) -> str:
        """The four bytes as text."""
        return token_id.to_bytes(4, "little").decode(errors="replace")


class _ByteStream:
    """For byte-level vocabularies: tokens are bytes, so their text comes out of a UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id) or b"")

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """For all others: decode the last tokens with and without the new ones, and emit the difference.

    ```
    _ids:  [ context | pending ]     context: text is out; kept, because spaces depend on neighbours
           0     _num_context        pending: text is not final
    ```

    Text that ends in a replacement character may be incomplete. Byte tokens are pending until another kind
    follows: the decoder judges a run of them as a whole, and one bad byte spoils the good ones before it.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids: list[int] = []
        self._num_context = 0

    def push(self, token_id: int) -> str:
        token = self._tokenizer._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None or token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        return "" if _BYTE_TOKEN.fullmatch(token) else self._emit(final=False)

    def flush(self) -> str:
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._num_context], skip_special_tokens=False)
        after = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            return ""
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        return after[len(before) :]


def _known_roles(messages: Sequence[Mapping[str, Any]], template: str) -> Sequence[Mapping[str, Any]]:
    """The messages without developers that the template does not know. Source: vLLM's HfRenderer."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    if '"developer"' in template or "'developer'" in template:
        return messages
    is_system = [message["role"] in ("system", "developer") for message in messages]
    if is_system[0] and not any(is_system[1:]):
        return [{**messages[0], "role": "system"}, *messages[1:]]
    texts = [
        _joined(message["content"]) for message, is_ours in zip(messages, is_system, strict=True) if is_ours
    ]
    others = [message for message, is_ours in zip(messages, is_system, strict=True) if not is_ours]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *others]


def _joined(content: Any) -> Any:
    """The text of a list of parts."""
    if not isinstance(content, list):
        return content
    return "\n".join(part["text"] for part in content if part["text"])


def _tokenizer_class(folder: Path) -> Any:
    """The class that reads a folder's tokenizer.

    AutoTokenizer takes seconds to import, since it knows every model. Where the folder asks for no class in
    particular, the general one reads the same files at once.
    """
    wanted = _read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if wanted in {"TokenizersBackend", "PreTrainedTokenizerFast"} and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


_TokenKind = Literal["byte_level", "byte_fallback", "other"]


def _token_kind(decoder: Any) -> _TokenKind:
    """How the vocabulary writes bytes; read off the decoder's pickled description, there is no accessor."""
    if decoder is None:
        return "other"
    description = json.loads(decoder.__getstate__())
    steps = {step["type"] for step in description.get("decoders", [description])}
    if steps == {"ByteLevel"}:
        return "byte_level"
    return "byte_fallback" if {"ByteFallback", "Replace"} <= steps else "other"


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies.

    Printable bytes stand for themselves, the others are numbered from U+0100 on.
    Source: `bytes_to_unicode` of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _bytes_of_token(token: str, kind: _TokenKind) -> bytes | None:
    if kind == "byte_level":
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            return token.encode()  # an added token, written as it is
    if kind == "byte_fallback":
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
    return None


def _read_json(path: Path) -> dict[str, Any]:
    """{} where there is no such file; a folder of tokenizer files alone is fine."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {str(path)!r}: {error}") from error
    return content if isinstance(content, dict) else {}


def _ids(value: int | Iterable[int] | None) -> list[int]:
    """Configs write one id, a list of them or null."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
