"""When a request ends, why, and what text it has then."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blendserve.engines.chat import ChatReader
from blendserve.engines.native.output import RequestOutput
from blendserve.models import ModelFiles
from blendserve.request import Completion, SamplingParams, TokenLogprob
from blendserve.tokenizer import Tokenizer
from tests.chat_answers import Pieces

EOS, OTHER_EOS, HIDDEN = 900, 901, 902
VOCABULARY = {1: "Hello", 2: ",", 3: " wor", 4: "ld", 5: "!", 6: "\n", 7: "\n\n", 8: "STOP", 9: "a", 10: "ab"}


class FakeTokenizer:
    """Tokens are strings; ids from 900 on are special; 20 and 21 are the two bytes of one character."""

    eos_token_ids = frozenset({EOS, OTHER_EOS})

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        stream = self.stream(skip_special_tokens)
        return "".join([stream.push(token_id) for token_id in token_ids] + [stream.flush()])

    def stream(self, skip_special_tokens: bool = True) -> "FakeStream":
        return FakeStream(skip_special_tokens)


class FakeStream:
    def __init__(self, skip_special_tokens: bool) -> None:
        self.skip_special_tokens = skip_special_tokens
        self.is_inside = False

    def push(self, token_id: int) -> str:
        if token_id >= 900:
            return "" if self.skip_special_tokens else f"<{token_id}>"
        if token_id == 20:
            self.is_inside = True
            return ""
        if token_id == 21:
            self.is_inside = False
            return "é"
        return VOCABULARY[token_id]

    def flush(self) -> str:
        return "\N{REPLACEMENT CHARACTER}" if self.is_inside else ""


def generate(tokens: list[int], params: SamplingParams, max_tokens: int = 100) -> Completion | None:
    """Feed tokens until the output says it is complete; None if it never does."""
    output = RequestOutput(params, max_tokens, FakeTokenizer())
    for token_id in tokens:
        if output.append(token_id):
            return output.completion(num_prompt_tokens=3)
    return None


def ending(completion: Completion | None) -> tuple[object, ...]:
    assert completion is not None
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason


def test_length() -> None:
    assert ending(generate([1, 2, 3, 4], SamplingParams(), max_tokens=3)) == (
        [1, 2, 3],
        "Hello, wor",
        "length",
        None,
    )


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_end_of_sequence_is_in_the_ids_and_not_in_the_text(eos: int) -> None:
    assert ending(generate([1, eos], SamplingParams())) == ([1, eos], "Hello", "stop", None)
    shown = generate([1, eos], SamplingParams(skip_special_tokens=False))
    assert ending(shown) == ([1, eos], "Hello", "stop", None)


def test_end_of_sequence_at_the_length_limit_is_a_stop() -> None:
    assert ending(generate([1, EOS], SamplingParams(), max_tokens=2)) == ([1, EOS], "Hello", "stop", None)


def test_ignored_end_of_sequence() -> None:
    params = SamplingParams(ignore_eos=True)
    assert ending(generate([EOS, 1, EOS], params, max_tokens=3)) == ([EOS, 1, EOS], "Hello", "length", None)
    # Named as a stop token it stops all the same.
    asked = replace(params, stop_token_ids=(EOS,))
    assert ending(generate([1, EOS], asked)) == ([1, EOS], "Hello", "stop", EOS)


def test_stop_token_ids() -> None:
    params = SamplingParams(stop_token_ids=(5,))
    assert ending(generate([1, 5, 2], params)) == ([1, 5], "Hello", "stop", 5)
    included = replace(params, include_stop_str_in_output=True)
    assert ending(generate([1, 5, 2], included)) == ([1, 5], "Hello!", "stop", 5)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("world", "Hello, "),
        ("o, w", "Hell"),
        (",", "Hello"),
        ("Hello", ""),
        ("ld!", "Hello, wor"),
        ("d!", "Hello, worl"),
    ],
)
def test_stop_strings_across_tokens(stop: str, text: str) -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    completion = generate(tokens, SamplingParams(stop=(stop,)))
    assert completion is not None
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", stop)
    included = generate(tokens, SamplingParams(stop=(stop,), include_stop_str_in_output=True))
    assert included is not None
    assert included.text == text + stop
    assert included.token_ids == completion.token_ids


def test_the_first_stop_string_of_the_list_wins() -> None:
    completion = generate([1, 10], SamplingParams(stop=("b", "ab")))
    assert ending(completion) == ([1, 10], "Helloa", "stop", "b")


def test_stop_string_beats_length() -> None:
    assert ending(generate([1, 5], SamplingParams(stop=("!",)), max_tokens=2)) == (
        [1, 5],
        "Hello",
        "stop",
        "!",
    )


def test_a_stop_string_that_never_comes_changes_nothing() -> None:
    params = SamplingParams(stop=("never", "wor!"))
    assert ending(generate([1, 2, 3, EOS], params)) == ([1, 2, 3, EOS], "Hello, wor", "stop", None)


def test_stop_strings_of_several_bytes() -> None:
    completion = generate([9, 20, 21, 9], SamplingParams(stop=("é",)))
    assert ending(completion) == ([9, 20, 21], "a", "stop", "é")
    # An incomplete character at the end is text, too.
    assert ending(generate([9, 20], SamplingParams(), max_tokens=2)) == ([9, 20], "a\ufffd", "length", None)
    assert ending(generate([9, 20], SamplingParams(stop=("é",)), max_tokens=2)) == (
        [9, 20],
        "a\ufffd",
        "length",
        None,
    )


def test_special_tokens_match_stop_strings_only_where_they_are_text() -> None:
    shown = SamplingParams(stop=(f"<{HIDDEN}>",), skip_special_tokens=False)
    assert ending(generate([1, HIDDEN], shown)) == ([1, HIDDEN], "Hello", "stop", f"<{HIDDEN}>")
    assert generate([1, HIDDEN], replace(shown, skip_special_tokens=True)) is None


def test_min_tokens_holds_off_every_kind_of_stop() -> None:
    params = SamplingParams(min_tokens=3, stop=("STOP",), stop_token_ids=(5,))
    output = RequestOutput(params, 100, FakeTokenizer())
    assert set(output.suppressed(len(output.token_ids))) == {EOS, OTHER_EOS, 5}
    # A stop string within the first min_tokens tokens does not count, as in vLLM.
    assert [output.append(token_id) for token_id in (8, 5, 8)] == [False, False, False]
    assert output.suppressed(len(output.token_ids)) == ()
    assert [output.append(token_id) for token_id in (9, 8)] == [False, True]
    assert ending(output.completion(3)) == ([8, 5, 8, 9, 8], "STOP!STOPa", "stop", "STOP")


def test_min_tokens_allows_a_stop_with_the_last_of_them() -> None:
    assert ending(generate([1, EOS], SamplingParams(min_tokens=2))) == ([1, EOS], "Hello", "stop", None)
    assert generate([EOS], SamplingParams(min_tokens=2)) is None


def test_logprobs_are_kept_where_asked_for() -> None:
    output = RequestOutput(SamplingParams(logprobs=1), 1, FakeTokenizer())
    entry = TokenLogprob(1, -0.5, ((1, -0.5),))
    assert output.append(1, entry)
    assert output.completion(3).logprobs == [entry]
    silent = generate([1], SamplingParams(), max_tokens=1)
    assert silent is not None
    assert silent.logprobs is None
    assert silent.num_prompt_tokens == 3


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = RequestOutput(SamplingParams(stop=("x",), stop_token_ids=(4,)), 100, None)
    assert [output.append(token_id) for token_id in (1, EOS, 4)] == [False, False, True]
    assert ending(output.completion(3)) == ([1, EOS, 4], "", "stop", 4)


@pytest.mark.parametrize("text", ["Grüße, 世界! 👩‍🚀 done", "plain words\n\nand STOP here", "ends with é"])
def test_real_tokenizer_finds_every_stop_string(bundled_model: ModelFiles, text: str) -> None:
    tokenizer = Tokenizer(bundled_model.folder)
    token_ids = tokenizer.encode(text)
    for start in range(len(text)):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            output = RequestOutput(SamplingParams(stop=(stop,)), len(token_ids), tokenizer)
            assert any(output.append(token_id) for token_id in token_ids)
            completion = output.completion(1)
            assert (completion.text, completion.stop_reason) == (text[: text.index(stop)], stop)


# -------- answers in chats --------


def answered(
    text: str, stop: tuple[str, ...], parser: str = "deepseek_r1", chat: bytes = b"{}", **params: object
) -> Completion | None:
    """Feed an answer token by token, each a character or a mark, until the output says it is complete."""
    pieces = Pieces()
    answer = ChatReader(pieces, "hermes", parser).open(chat)
    token_ids = pieces.encode(text)
    output = RequestOutput(SamplingParams(stop=stop, **params), len(token_ids), pieces, answer)
    for token_id in token_ids:
        if output.append(token_id):
            return output.completion(3, b"prompt")
    return None


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_stop_strings_do_not_count_in_reasoning(parser: str) -> None:
    completion = answered("<think>a STOP b</think>c STOP d", ("STOP", "b</think>c"), parser)
    assert completion is not None
    assert (completion.text, completion.stop_reason) == ("<think>a STOP b</think>c ", "STOP")
    assert completion.message is not None
    assert (completion.message["reasoning"], completion.message["content"]) == ("a STOP b", "c ")
    assert completion.num_reasoning_tokens == 8
    # It begins in the reasoning, or there is nothing else.
    assert ending_of(answered("a</think>b", ("a</think>", "</think>"))) == ("a</think>b", "length", None)
    assert ending_of(answered("a STOP b", ("STOP",), parser)) == ("a STOP b", "length", None)


def ending_of(completion: Completion | None) -> tuple[object, ...]:
    assert completion is not None
    return completion.text, completion.finish_reason, completion.stop_reason


@pytest.mark.parametrize(
    ("parser", "chat"),
    [
        ("deepseek_r1", b'{"stop_in_reasoning": true}'),
        ("qwen3", b'{"chat_template_kwargs": {"enable_thinking": false}}'),
    ],
)
def test_stop_strings_count_from_the_start(parser: str, chat: bytes) -> None:
    assert ending_of(answered("<think>a STOP b", ("STOP",), parser, chat)) == ("<think>a ", "stop", "STOP")


def test_a_call_ends_the_reasoning_of_qwen_for_stop_strings() -> None:
    text = 'STOP<tool_call>{"name": "f", "arguments": {}}</tool_call>STOP'
    chat = b'{"tools": [{}], "tool_choice": "auto"}'
    completion = answered(text, ("</tool_call>",), "qwen3", chat, include_stop_str_in_output=True)
    assert completion is not None
    assert completion.text == text.removesuffix("STOP")
    assert completion.message is not None
    assert completion.message["reasoning"] == "STOP"
    assert (completion.finish_reason, completion.stop_reason) == ("tool_calls", "</tool_call>")
    assert len(completion.message["tool_calls"]) == 1


@pytest.mark.parametrize("min_tokens", range(12))
def test_min_tokens_and_reasoning_both_hold_off_stop_strings(min_tokens: int) -> None:
    completion = answered("a!</think>b!c!d!", ("!",), min_tokens=min_tokens)
    assert completion is not None
    kept = {4: "a!</think>b", 6: "a!</think>b!c", 8: "a!</think>b!c!d"}
    expected = next((text for length, text in kept.items() if length >= min_tokens), "a!</think>b!c!d!")
    assert completion.text == expected


def test_logprobs_of_reasoning_that_is_left_out_are_not_told() -> None:
    answer = ChatReader(Pieces(), None, "deepseek_r1").open(b'{"include_reasoning": false}')
    output = RequestOutput(SamplingParams(logprobs=0), 1, Pieces(), answer)
    assert output.append(200, TokenLogprob(200, -0.5))
    assert output.completion(1).logprobs is None
