from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendserve.errors import ModelError, RequestError
from blendserve.models import ModelFiles
from blendserve.tokenizer import Tokenizer

pytest.importorskip("transformers")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁hello", "▁world", "hello", "s", ".", "é", "中", "\N{REPLACEMENT CHARACTER}"]


@pytest.fixture(scope="module")
def byte_level(bundled_model: ModelFiles) -> Tokenizer:
    """Vocabulary in the manner of GPT-2, Llama 3 and Qwen."""
    return Tokenizer(bundled_model.folder)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Vocabulary in the manner of Llama 2 and Mistral: special tokens, bytes, words with ▁ for a space."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *WORDS]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    folder = tmp_path_factory.mktemp("byte-fallback")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return Tokenizer(folder)


class TestEncode:
    def test_batch_equals_one_by_one(self, byte_level: Tokenizer) -> None:
        texts = ["", "Hello, world!", "naïve 中文 🙂", "a" * 3000]
        assert byte_level.encode_batch(texts) == [byte_level.encode(text) for text in texts]

    # SmolLM2 has no token for some control characters and for bytes of unassigned ones, and drops them.
    @given(text=st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=("Cc", "Cs"))))
    @settings(deadline=None)
    def test_decode_undoes_encode(self, byte_level: Tokenizer, text: str) -> None:
        ids = byte_level.encode(text)
        assert byte_level.decode(ids, skip_special_tokens=False) == text

    def test_padding_and_truncation_saved_with_a_tokenizer_are_off(
        self, bundled_model: ModelFiles, tmp_path: Path
    ) -> None:
        content = json.loads((bundled_model.folder / "tokenizer.json").read_text())
        content["truncation"] = {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        content["padding"] = {
            "strategy": {"Fixed": 9},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        shutil.copy(bundled_model.folder / "tokenizer_config.json", tmp_path)
        assert len(Tokenizer(tmp_path).encode("one two three four five six")) == 6


class TestChat:
    def test_the_bundled_template_brings_its_system_prompt(self, byte_level: Tokenizer) -> None:
        prompt = byte_level.render_chat(QUESTION)
        assert prompt == (
            "<|im_start|>system\n"
            "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        ids = byte_level.encode(prompt, add_special_tokens=False)
        assert byte_level.token_text(ids[0]) == "<|im_start|>"
        assert byte_level.decode(ids, skip_special_tokens=False) == prompt

    def test_generation_prompt_can_be_left_out(self, byte_level: Tokenizer) -> None:
        prompt = byte_level.render_chat(QUESTION, add_generation_prompt=False)
        assert prompt.endswith("France?<|im_end|>\n")

    def test_tools_and_variables_reach_the_template(self, bundled_model: ModelFiles, tmp_path: Path) -> None:
        tokenizer = with_template(bundled_model, tmp_path, "{{ tools[0].function.name }} {{ mood }}")
        tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
        rendered = tokenizer.render_chat(QUESTION, tools=tools, chat_template_kwargs={"mood": "calm"})
        assert rendered == "look_up calm"

    def test_developers_are_the_system_where_the_template_knows_none(
        self, byte_level: Tokenizer, bundled_model: ModelFiles, tmp_path: Path
    ) -> None:
        developer = {"role": "developer", "content": "Be brief."}
        system = {"role": "system", "content": "You are a poet."}
        alone = byte_level.render_chat([developer, *QUESTION])
        assert alone == byte_level.render_chat([{**developer, "role": "system"}, *QUESTION])
        both = byte_level.render_chat([system, *QUESTION, developer])
        merged = {"role": "system", "content": "You are a poet.\n\nBe brief."}
        assert both == byte_level.render_chat([merged, *QUESTION])
        knowing = with_template(
            bundled_model, tmp_path, "{{ messages[0].role }}{# messages[0].role == 'developer' #}"
        )
        assert knowing.render_chat([developer, *QUESTION]) == "developer"

    def test_templates_that_take_parts_get_them(self, bundled_model: ModelFiles, tmp_path: Path) -> None:
        texts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        messages = [{"role": "user", "content": texts}, {"role": "tool", "content": texts}, *QUESTION]
        plain = with_template(
            bundled_model,
            tmp_path / "plain",
            "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
        )
        assert plain.render_chat(messages) == f"user:one\ntwo;tool:one\ntwo;user:{QUESTION[0]['content']};"
        parts = with_template(
            bundled_model,
            tmp_path / "parts",
            "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor %}",
        )
        assert (
            parts.render_chat(messages) == f"user:[one][two];tool:one\ntwo;user:[{QUESTION[0]['content']}];"
        )

    def test_developers_may_write_in_parts(self, byte_level: Tokenizer) -> None:
        texts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
        both = byte_level.render_chat([{"role": "developer", "content": texts}, *QUESTION])
        assert both == byte_level.render_chat([{"role": "system", "content": "Be\nbrief."}, *QUESTION])

    def test_the_final_message_can_be_continued(self, byte_level: Tokenizer) -> None:
        messages = [*QUESTION, {"role": "assistant", "content": "It is"}]
        prompt = byte_level.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
        assert prompt.endswith("<|im_start|>assistant\nIt is")

    @pytest.mark.parametrize(
        "messages",
        [[], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "user", "content": [{}]}]],
    )
    def test_messages_the_template_cannot_render(self, byte_level: Tokenizer, messages: list[Any]) -> None:
        with pytest.raises(RequestError, match="every content is a string") as caught:
            byte_level.render_chat(messages)
        assert (caught.value.code, caught.value.param) == ("invalid_request", "messages")

    def test_what_the_template_itself_refuses(self, bundled_model: ModelFiles, tmp_path: Path) -> None:
        tokenizer = with_template(bundled_model, tmp_path, "{{ raise_exception('roles must alternate') }}")
        with pytest.raises(RequestError, match="roles must alternate"):
            tokenizer.render_chat(QUESTION)

    def test_without_a_template(self, byte_fallback: Tokenizer) -> None:
        with pytest.raises(RequestError, match="has no chat template"):
            byte_fallback.render_chat(QUESTION)

    @pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation"])
    def test_a_request_cannot_set_arguments_of_the_call(self, byte_level: Tokenizer, name: str) -> None:
        with pytest.raises(RequestError, match=name) as caught:
            byte_level.render_chat(QUESTION, chat_template_kwargs={name: "x"})
        assert caught.value.param == "chat_template_kwargs"

    def test_every_argument_of_the_call_is_reserved(self) -> None:
        import inspect

        from transformers import PreTrainedTokenizerFast

        from blendserve.tokenizer import _RESERVED_TEMPLATE_KWARGS

        arguments = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters.keys()
        assert arguments - {"self", "kwargs", "documents"} <= _RESERVED_TEMPLATE_KWARGS


def token_ids(vocab_size: int, favourites: range) -> st.SearchStrategy[list[int]]:
    """Any tokens, with runs of those where mistakes hide; also ids that no token has."""
    return st.lists(st.one_of(st.integers(0, vocab_size + 5), st.sampled_from(favourites)), max_size=40)


class TestStream:
    @given(ids=token_ids(49152, range(280)), skip=st.booleans())
    @settings(deadline=None, max_examples=300)
    def test_byte_level_joins_to_the_full_decode(
        self, byte_level: Tokenizer, ids: list[int], skip: bool
    ) -> None:
        assert streamed(byte_level, ids, skip) == byte_level.decode(ids, skip)

    @given(ids=token_ids(269, range(269)), skip=st.booleans())
    @settings(deadline=None, max_examples=1000)
    def test_byte_fallback_joins_to_the_full_decode(
        self, byte_fallback: Tokenizer, ids: list[int], skip: bool
    ) -> None:
        assert streamed(byte_fallback, ids, skip) == byte_fallback.decode(ids, skip)

    @given(text=st.text(alphabet="aé中🙂 ▁\N{REPLACEMENT CHARACTER}\x00"), skip=st.booleans())
    @settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    def test_text_of_several_bytes_a_character(
        self, byte_level: Tokenizer, byte_fallback: Tokenizer, text: str, skip: bool
    ) -> None:
        for tokenizer in (byte_level, byte_fallback):
            ids = tokenizer.encode(text)
            assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip)

    def test_text_is_out_as_soon_as_it_is_final(self, byte_level: Tokenizer) -> None:
        stream = byte_level.stream()
        pushed = [stream.push(token_id) for token_id in byte_level.encode("Paris 𓂀!")]
        assert (pushed[0], pushed[-2][-1:], pushed[-1]) == ("Paris", "𓂀", "!")
        assert "" in pushed  # inside the hieroglyph
        assert "".join(pushed) == "Paris 𓂀!"
        assert stream.flush() == ""

    def test_words_are_out_at_once_with_byte_fallback_too(self, byte_fallback: Tokenizer) -> None:
        stream = byte_fallback.stream()
        hello, world, stop = (id_of(byte_fallback, token) for token in ("▁hello", "▁world", "."))
        assert [stream.push(token_id) for token_id in (hello, world, stop)] == ["hello", " world", "."]

    def test_a_character_cut_off_comes_with_flush(self, byte_level: Tokenizer) -> None:
        ids = byte_level.encode("𓂀")[:-1]
        assert ids
        stream = byte_level.stream()
        assert "".join(stream.push(token_id) for token_id in ids) == ""
        assert stream.flush() == byte_level.decode(ids) == "\N{REPLACEMENT CHARACTER}"

    def test_a_bad_byte_spoils_the_run_before_it(self, byte_fallback: Tokenizer) -> None:
        """Text of a good run must not be out before the run ends: the full decode would not contain it."""
        ids = [id_of(byte_fallback, f"<0x{byte:02X}>") for byte in (*"中".encode(), 0xFF)]
        assert byte_fallback.decode(ids[:3]) == "中"
        assert (
            streamed(byte_fallback, ids, True) == byte_fallback.decode(ids) == "\N{REPLACEMENT CHARACTER}" * 4
        )

    def test_special_tokens_are_skipped_or_shown(self, byte_level: Tokenizer) -> None:
        ids = [*byte_level.encode("Paris"), *byte_level.eos_token_ids]
        assert streamed(byte_level, ids, True) == "Paris"
        assert streamed(byte_level, ids, False) == "Paris<|im_end|>"


class TestTokens:
    def test_byte_level_bytes_join_to_the_text(self, byte_level: Tokenizer) -> None:
        text = " naïve 中文 🙂"
        tokens = [byte_level.token_bytes(token_id) for token_id in byte_level.encode(text)]
        assert b"".join(token for token in tokens if token is not None) == text.encode()

    def test_byte_fallback(self, byte_fallback: Tokenizer) -> None:
        for token, text, raw in [
            ("▁hello", " hello", b" hello"),
            ("<0x41>", "A", b"A"),
            ("中", "中", "中".encode()),
        ]:
            token_id = id_of(byte_fallback, token)
            assert (byte_fallback.token_text(token_id), byte_fallback.token_bytes(token_id)) == (text, raw)
        assert byte_fallback.token_bytes(id_of(byte_fallback, "<0xE4>")) == b"\xe4"
        assert byte_fallback.token_text(id_of(byte_fallback, "<0xE4>")) == "\N{REPLACEMENT CHARACTER}"

    def test_special_tokens_have_their_name_as_text(self, byte_level: Tokenizer) -> None:
        assert byte_level.token_text(2) == "<|im_end|>"
        assert byte_level.token_bytes(2) == b"<|im_end|>"

    @pytest.mark.parametrize("token_id", [-1, 10**6])
    def test_an_id_without_a_token_has_no_text(self, byte_level: Tokenizer, token_id: int) -> None:
        assert byte_level.token_bytes(token_id) is None
        assert byte_level.stream().push(token_id) == ""

    def test_end_of_turn_ends_the_output_of_the_bundled_model(self, byte_level: Tokenizer) -> None:
        assert set(byte_level.encode("<|im_end|>")) <= byte_level.eos_token_ids

    def test_end_tokens_of_both_configs_and_of_the_tokenizer(
        self, bundled_model: ModelFiles, tmp_path: Path
    ) -> None:
        copy_tokenizer(bundled_model, tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
        assert Tokenizer(tmp_path).eos_token_ids == {2, 7, 8, 9}

    def test_vocabulary_is_the_models_where_that_is_known(
        self, bundled_model: ModelFiles, tmp_path: Path
    ) -> None:
        copy_tokenizer(bundled_model, tmp_path)
        assert Tokenizer(tmp_path).vocab_size == 49152
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 50000}))
        assert Tokenizer(tmp_path).vocab_size == 50000


class TestLoading:
    def test_a_folder_without_a_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            Tokenizer(tmp_path)

    def test_a_broken_tokenizer_file(self, bundled_model: ModelFiles, tmp_path: Path) -> None:
        copy_tokenizer(bundled_model, tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            Tokenizer(tmp_path)

    def test_code_in_the_folder_runs_only_where_that_is_asked_for(
        self, bundled_model: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers import dynamic_module_utils

        monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.setattr(sys, "path", [*sys.path])
        folder, marker = tmp_path / "model", tmp_path / "ran"
        folder.mkdir()
        copy_tokenizer(bundled_model, folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config |= {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "own.py").write_text(
            "from pathlib import Path\n"
            "from transformers import PreTrainedTokenizerFast\n"
            f"Path({str(marker)!r}).touch()\n"
            "class OwnTokenizer(PreTrainedTokenizerFast): pass\n"
        )
        with pytest.raises(ModelError, match="--trust-remote-code"):
            Tokenizer(folder)
        assert not marker.exists()
        Tokenizer(folder, trust_remote_code=True)
        assert marker.exists()


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
    stream = tokenizer.stream(skip_special_tokens)
    return "".join([*(stream.push(token_id) for token_id in ids), stream.flush()])


def id_of(tokenizer: Tokenizer, token: str) -> int:
    return ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *WORDS].index(token)


def copy_tokenizer(model: ModelFiles, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model.folder / name, folder)


def with_template(model: ModelFiles, folder: Path, template: str) -> Tokenizer:
    copy_tokenizer(model, folder)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)
