"""From rows to a table that can be planned and run: duplicates, models, chat templates, tokens, context limits."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from blendserve.errors import ConfigError, RequestError
from blendserve.jobs.body import invalid, shown
from blendserve.jobs.columns import CustomIds, LineErrors, RowTable
from blendserve.jobs.openai_format import (
    URLS,
    LineError,
    PreparedRow,
    Row,
    Tokenizer,
    place,
)
from blendserve.jobs.sources import CHAT_URL
from blendserve.jobs.spool import RequestSpool
from blendserve.request import Adapter, RawRequests, RequestTable, SamplingParams
from blendserve.tokens import PromptTokens

DEFAULT_COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; chat goes on to the end of the context"""
_MOST_TOKENS = 1 << 17
"""of a forwarded row, as far as planning goes"""
_ENCODE_CHUNK = 2048
"""lines rendered and encoded at a time; bounds how many prompts exist as text"""
_ENCODE_CHUNK_BYTES = 64 << 20
"""and of how many bytes, at least one line"""
_MAX_TOKEN_CHARACTERS = 512
"""no vocabulary has longer tokens; a text beyond this many per token of the context is not worth encoding"""

Phase = Literal["reading", "planning"]
OnProgress = Callable[[Phase, int], None]
"""told what is being done, and to how many lines so far"""


@dataclass(slots=True)
class Prepared:
    """A job's input, ready to plan and run.

    Request i is completion `sample_index[i]` of `rows[row_index[i]]`.
    """

    requests: RequestTable
    rows: Sequence[PreparedRow]
    row_index: NDArray[np.int32]
    """[num_requests]"""
    sample_index: NDArray[np.int32]
    """[num_requests] 0 .. n-1 within the row"""
    errors: Sequence[LineError]
    """lines that cannot run, in line order"""
    num_lines: int
    """lines read, blank ones not counted: `len(rows) + len(errors) + num_done`"""
    num_done: int
    """lines left out because their result exists"""


def prepare(
    rows: Iterable[Row | LineError],
    tokenizer: Tokenizer,
    *,
    served_model_name: str,
    max_model_len: int,
    any_model: bool = False,
    endpoint: str | None = None,
    limit: int | None = None,
    done: Container[str] = frozenset(),
    seed: int = 0,
    on_progress: OnProgress | None = None,
    strict: bool = False,
    fill_context: bool = False,
    adapters: Mapping[str, str] | None = None,
    check_params: Callable[[SamplingParams], None] = lambda _params: None,
) -> Prepared:
    """Check, render and encode the lines of a job.

    Only the first `limit` lines count. A line must name `served_model_name` or no model, unless `any_model`;
    its url must be `endpoint`, unless None. Lines whose custom_id is in `done` have their result and are left
    out; they still count for duplicates, so that a resumed job refuses the same lines as an unbroken one.
    Lines that bring no seed get one from `seed` and their custom_id. Rows with a `body` to forward are one request
    each, and their lengths are for planning only: it is the server that refuses what it cannot serve. With
    `fill_context` a `max_tokens` that is missing or too large for the context means to the end of it, whatever the url.
    `adapters` are LoRA adapters, path by name: a line whose model is one of them runs with it. `check_params` raises
    a RequestError for what the engine cannot do.

    Raises:
        ConfigError: `strict`, and a line cannot run.
    """
    builder = _TableBuilder(tokenizer, max_model_len, seed, fill_context, check_params)
    admission = _Admission(served_model_name, any_model, endpoint, adapters or {})
    errors = LineErrors()
    num_lines = num_done = 0
    for chunk in _chunks(islice(rows, limit)):
        if on_progress is not None:
            on_progress("reading", num_lines)
        refused: dict[int, LineError] = {}
        admitted: dict[int, tuple[Row, int]] = {}
        for index, row in enumerate(chunk):
            try:
                id_number = admission.register(row)
                if isinstance(row, LineError):
                    refused[index] = row
                elif row.custom_id in done:
                    num_done += 1
                else:
                    admission.check(row)
                    if adapters and row.model is not None and row.model in adapters:
                        row.params = replace(row.params, adapter=Adapter(row.model, adapters[row.model]))
                    admitted[index] = (row, id_number)
            except RequestError as error:
                refused[index] = LineError.of(error, row.line, row.custom_id, row.file)
        refused |= builder.add(admitted)
        num_lines += len(chunk)
        for _, line_error in sorted(refused.items()):
            if strict:
                whose = f" ({shown(line_error.custom_id)})" if line_error.custom_id else ""
                raise ConfigError(
                    f"{line_error.place}{whose}: {line_error.code}: {line_error.message} "
                    "Nothing was run; without --strict the other lines would be."
                )
            errors.append(line_error)
    return builder.build(admission, errors, num_lines, num_done)


def _chunks(rows: Iterable[Row | LineError]) -> Iterator[list[Row | LineError]]:
    chunk: list[Row | LineError] = []
    num_bytes = 0
    for row in rows:
        chunk.append(row)
        num_bytes += row.num_bytes if isinstance(row, Row) else 0
        if len(chunk) == _ENCODE_CHUNK or num_bytes >= _ENCODE_CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


class _Admission:
    """What lines must have in common or not, with the place of every custom_id."""

    def __init__(
        self, served_model_name: str, any_model: bool, endpoint: str | None, adapters: Mapping[str, str]
    ) -> None:
        self._served_model_name = served_model_name
        self._adapters = adapters
        self._any_model = any_model
        self._endpoint = endpoint
        self._first_model: str | None = None
        self._file_numbers: dict[str | None, int] = {}
        self.custom_ids = CustomIds()
        # per custom_id
        self.lines = array("q")
        self.file_numbers = array("i")

    @property
    def files(self) -> list[str | None]:
        """By file number."""
        return list(self._file_numbers)

    def register(self, row: Row | LineError) -> int:
        """Number of the row's custom_id; -1 where it cannot be told or is that of a line that is not JSON.

        Raises:
            RequestError: another line has the same one.
        """
        if row.custom_id is None or (isinstance(row, LineError) and row.code == "invalid_json_line"):
            return -1
        number = self.custom_ids.add(row.custom_id)
        if number == len(self.lines):
            self.lines.append(row.line)
            self.file_numbers.append(self._file_numbers.setdefault(row.file, len(self._file_numbers)))
        elif isinstance(row, Row):
            first = place(self.lines[number], self.files[self.file_numbers[number]])
            raise RequestError(
                "duplicate_custom_id",
                f"The custom_id {shown(row.custom_id)} of {place(row.line, row.file)} is already that of "
                f"{first}. Give every line its own.",
                param="custom_id",
            )
        return number

    def check(self, row: Row) -> None:
        """Refuse another url than the job's, and a model that it does not serve.

        ```
        a line names another model, and the first line that names any          code
        names this same one: the whole file is for another model               model_not_found
        names a different one: this line does not belong into the file         model_mismatch
        ```
        """
        if self._endpoint is not None and row.url != self._endpoint:
            raise RequestError(
                "url_mismatch",
                f"The url {row.url} is not the batch's endpoint, {self._endpoint}. Use one url for all.",
                param="url",
            )
        if row.model is None or self._any_model or row.model in self._adapters:
            return
        if self._first_model is None:
            self._first_model = row.model
        if row.model == self._served_model_name:
            return
        if row.model != self._first_model:
            raise RequestError(
                "model_mismatch",
                f"The model {shown(row.model)} is not that of the lines before, {shown(self._first_model)}. "
                "Write a file per model, or pass --any-model.",
                param="model",
            )
        raise RequestError(
            "model_not_found",
            f"The model {shown(row.model)} does not exist; this job serves "
            f"{', '.join(map(shown, (self._served_model_name, *self._adapters)))}. Change 'model' in the line, "
            "serve the model by that name (--served-model-name), or pass --any-model.",
            param="model",
            status_code=404,
        )


def _sampling_seed(job_seed: int, row: Row, sample: int) -> int:
    """64-bit seed of one completion of a row; the samples of a row differ, and nothing else has a say in it."""
    if row.params.seed is not None:
        return (row.params.seed + sample) % 2**64
    identity = f"{job_seed}:{sample}:{row.custom_id}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


class _TableBuilder:
    """Grows the columns of a `RequestTable` without a Python object per request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        seed: int,
        fill_context: bool,
        check_params: Callable[[SamplingParams], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._check_params = check_params
        self._seed = seed
        self._fill_context = fill_context
        self._max_model_len = max_model_len
        # per row
        self._id_numbers = array("i")
        self._urls = array("B")
        self._ns = array("B")
        self._data = array("I")
        self._starts = array("q")
        self._lengths = array("i")
        self._max_tokens = array("i")
        self._declared_tokens = array("i")
        # per request
        self._row_index = array("i")
        self._sample_index = array("i")
        self._params_index = array("i")
        self._seeds = array("Q")
        self._params: dict[SamplingParams, int] = {}
        self._spool: RequestSpool | None = None

    def add(self, rows: dict[int, tuple[Row, int]]) -> dict[int, LineError]:
        """Append rows, given with the numbers of their custom_ids. Returns those that cannot run, by key."""
        prompts: dict[int, Sequence[int]] = {}
        texts: dict[bool, list[tuple[int, str]]] = {False: [], True: []}
        refused: dict[int, LineError] = {}
        for index, (row, _) in rows.items():
            if isinstance(row.prompt, list):
                prompts[index] = row.prompt
            else:
                try:
                    texts[row.add_special_tokens].append((index, self._render(row)))
                except RequestError as error:
                    refused[index] = LineError.of(error, row.line, row.custom_id, row.file)
        for add_special_tokens, items in texts.items():
            if items:
                encoded = self._tokenizer.encode_batch(
                    [text for _, text in items], add_special_tokens=add_special_tokens
                )
                for (index, _), token_ids in zip(items, encoded, strict=True):
                    prompts[index] = token_ids
        for index, (row, id_number) in rows.items():
            if index not in refused:
                try:
                    self._append(row, id_number, prompts.pop(index))
                except RequestError as error:
                    refused[index] = LineError.of(error, row.line, row.custom_id, row.file)
        return refused

    def _render(self, row: Row) -> str:
        if row.chat is None:
            assert isinstance(row.prompt, str)
            text = row.prompt
        else:
            text = self._tokenizer.render_chat(
                row.chat,
                tools=row.tools,
                add_generation_prompt=row.add_generation_prompt,
                continue_final_message=row.continue_final_message,
                chat_template_kwargs=row.chat_template_kwargs,
            )
        if row.body is None and len(text) > _MAX_TOKEN_CHARACTERS * self._max_model_len:
            name = _prompt_name(row)
            raise RequestError(
                "context_length_exceeded",
                f"This model's maximum context length is {self._max_model_len} tokens. However, your {name} "
                f"has {len(text):,} characters. Please reduce the length of the {name}.",
                param=name,
            )
        return text

    def _append(self, row: Row, id_number: int, prompt: Sequence[int]) -> None:
        if row.body is not None:
            self._append_forwarded(row, row.body, id_number, prompt)
            return
        max_tokens = self._checked_max_tokens(row, prompt)
        self._check_params(row.params)
        params = row.params
        ends_at_max_tokens = params.ignore_eos and not params.stop and not params.stop_token_ids
        declared_tokens = max_tokens if ends_at_max_tokens else min(row.output_tokens or 0, max_tokens)
        if row.media is not None or self._spool is not None:
            self._append_media(row)
        self._append_row(row, id_number, row.n, prompt, max_tokens, declared_tokens)

    def _append_forwarded(self, row: Row, body: bytes, id_number: int, prompt: Sequence[int]) -> None:
        """One request for all completions of a row, expected to be as long as they are together."""
        if self._spool is None:
            self._spool = RequestSpool()
        self._spool.append(row.url, body)
        room = max(self._max_model_len - len(prompt), 1)
        default = room if row.url == CHAT_URL else DEFAULT_COMPLETIONS_MAX_TOKENS
        max_tokens = min(row.n * (row.max_tokens or default), _MOST_TOKENS)
        declared_tokens = min(row.n * (row.output_tokens or 0), max_tokens)
        self._append_row(row, id_number, 1, prompt if len(prompt) else [0], max_tokens, declared_tokens)

    def _append_media(self, row: Row) -> None:
        """Keep a row's media, if it has some, as the row's that is appended next."""
        if self._spool is None:
            self._spool = RequestSpool()
            for _ in range(len(self._id_numbers)):
                self._spool.append(row.url, b"")
        self._spool.append(row.url, row.media or b"")

    def _append_row(
        self,
        row: Row,
        id_number: int,
        n: int,
        prompt: Sequence[int],
        max_tokens: int,
        declared_tokens: int,
    ) -> None:
        row_index = len(self._id_numbers)
        self._id_numbers.append(id_number)
        self._urls.append(URLS.index(row.url))
        self._ns.append(n)
        self._starts.append(len(self._data))
        self._data.extend(prompt)
        self._lengths.append(len(prompt))
        self._max_tokens.append(max_tokens)
        self._declared_tokens.append(declared_tokens)
        params = row.params
        shared = params if params.seed is None else replace(params, seed=None)
        params_index = self._params.setdefault(shared, len(self._params))
        for sample in range(n):
            if sample == 1 and shared.prompt_logprobs is not None:
                # Those of the first sample are those of all.
                others = replace(shared, prompt_logprobs=None)
                params_index = self._params.setdefault(others, len(self._params))
            self._row_index.append(row_index)
            self._sample_index.append(sample)
            self._params_index.append(params_index)
            self._seeds.append(_sampling_seed(self._seed, row, sample))

    def _checked_max_tokens(self, row: Row, prompt: Sequence[int]) -> int:
        """Most tokens that the row may generate.

        Raises:
            RequestError: the prompt or the output does not fit the model.
        """
        vocab_size = self._tokenizer.vocab_size
        name = _prompt_name(row)
        if not len(prompt):
            raise RequestError("invalid_request", f"'{name}' has no tokens. Give at least one.", param=name)
        for param, token_ids in (("prompt", prompt), *_token_ids_of(row.params)):
            if token_ids and max(token_ids) >= vocab_size:
                raise invalid(
                    param, max(token_ids), f"token ids below {vocab_size}, the size of the vocabulary"
                )
        context = f"This model's maximum context length is {self._max_model_len} tokens. However, "
        room = self._max_model_len - len(prompt)
        if room < 1:
            raise RequestError(
                "context_length_exceeded",
                f"{context}your {name} resulted in {len(prompt)} tokens and the completion needs at least 1. "
                f"Please reduce the length of the {name}.",
                param=name,
            )
        if self._fill_context:
            max_tokens = min(row.max_tokens or room, room)
        elif row.max_tokens is None:
            max_tokens = room if row.chat is not None else min(DEFAULT_COMPLETIONS_MAX_TOKENS, room)
        elif row.max_tokens > room:
            raise RequestError(
                "context_length_exceeded",
                f"{context}you requested {len(prompt) + row.max_tokens} tokens ({len(prompt)} in the {name}, "
                f"{row.max_tokens} in the completion). Please reduce the length of the {name} or completion.",
                param=name,
            )
        else:
            max_tokens = row.max_tokens
        if row.params.min_tokens > max_tokens:
            raise invalid(
                "min_tokens", row.params.min_tokens, f"at most {max_tokens}, the limit of the completion"
            )
        return max_tokens

    def build(self, admission: _Admission, errors: LineErrors, num_lines: int, num_done: int) -> Prepared:
        row_index = np.asarray(self._row_index, dtype=np.int32)
        id_number = np.asarray(self._id_numbers, dtype=np.int32)
        prompts = PromptTokens(
            np.asarray(self._data, dtype=np.uint32), np.asarray(self._starts), np.asarray(self._lengths)
        )
        requests = RequestTable(
            tokens=prompts.take(row_index),
            max_tokens=np.asarray(self._max_tokens, dtype=np.int32)[row_index],
            declared_tokens=np.asarray(self._declared_tokens, dtype=np.int32)[row_index],
            params=list(self._params),
            params_index=np.asarray(self._params_index, dtype=np.int32),
            seeds=np.asarray(self._seeds, dtype=np.uint64),
            raw=None if self._spool is None else RawRequests(self._spool, row_index),
        )
        rows = RowTable(
            admission.custom_ids,
            id_number,
            np.asarray(admission.lines, dtype=np.int64)[id_number],
            np.asarray(admission.file_numbers, dtype=np.int32)[id_number],
            np.asarray(self._urls, dtype=np.uint8),
            np.asarray(self._ns, dtype=np.uint8),
            files=admission.files,
            urls=URLS,
        )
        return Prepared(
            requests=requests,
            rows=rows,
            row_index=row_index,
            sample_index=np.asarray(self._sample_index, dtype=np.int32),
            errors=errors,
            num_lines=num_lines,
            num_done=num_done,
        )


def _token_ids_of(params: SamplingParams) -> Iterator[tuple[str, Sequence[int]]]:
    """Parameters that name tokens, with these."""
    yield "stop_token_ids", params.stop_token_ids
    yield "logprob_token_ids", params.logprob_token_ids
    if params.extra:
        extra = orjson.loads(params.extra)
        yield "allowed_token_ids", extra.get("allowed_token_ids", ())
        yield "logit_bias", [*map(int, extra.get("logit_bias", ()))]


def _prompt_name(row: Row) -> str:
    return "prompt" if row.chat is None else "messages"
