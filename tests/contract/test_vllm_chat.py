"""Chats and adapters on vLLM: prompts as its own server renders them, answers as it reads them, KV kept apart."""

import base64
import io
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from blendserve.engines import EXTRA_PARAMETERS, EngineConfig
from blendserve.errors import ConfigError
from blendserve.jobs.job import GatheredResults
from blendserve.jobs.openai_format import Row, row_of_body
from blendserve.jobs.prepare import Prepared, prepare
from blendserve.jobs.sources import CHAT_URL
from blendserve.planner.plan import make_plan
from blendserve.request import Completion, Failure
from blendserve.scheduling.policies import make_policy
from blendserve.tokenizer import Tokenizer
from tests.contract.conftest import COST_MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def engine(roomy_vllm: Any) -> Any:
    return roomy_vllm


@pytest.fixture
def tokenizer(vllm_tokenizer: Tokenizer) -> Tokenizer:
    return vllm_tokenizer


def prepared(tokenizer: Tokenizer, *bodies: dict[str, Any], **options: Any) -> Prepared:
    rows = []
    for number, body in enumerate(bodies, start=1):
        row = row_of_body(
            {"messages": HELLO, "temperature": 0, "max_tokens": 300, **body},
            CHAT_URL,
            line=number,
            custom_id=f"r{number}",
            extra_parameters=EXTRA_PARAMETERS["vllm"],
            chat_features=EngineConfig(
                engine="vllm", enable_auto_tool_choice=True, tool_call_parser="hermes"
            ).chat_features,
        )
        assert isinstance(row, Row)
        rows.append(row)
    found = prepare(rows, tokenizer, served_model_name="tiny", max_model_len=1024, **options)
    assert list(found.errors) == []
    return found


def answers(engine: Any, found: Prepared) -> list[Any]:
    """[num_rows] the first completion of each row, or why it has none."""
    gathered = GatheredResults(found)
    results: dict[int, Any] = {}
    policy = make_policy("fcfs", make_plan(found.requests, engine.cost_model))
    for step in engine.run(found.requests, policy):
        for request, result in step.results:
            if (answer := gathered.add(request, result)) is not None:
                is_failure = isinstance(answer.result, Failure)
                results[answer.row_index] = answer.result if is_failure else answer.result[0]
    assert gathered.num_open == 0
    return [results[row] for row in range(len(found.rows))]


def thoughtless(tokenizer: Tokenizer, **body: Any) -> dict[str, Any]:
    """A body whose answer ends its reasoning at once, and has no blanks where a grammar leaves them open."""
    blanks = [token for token in range(49152) if tokenizer.token_text(token).isspace()]
    bias = dict.fromkeys(map(str, blanks), -100)
    return {
        "logit_bias": {**bias, str(tokenizer.encode("</think>", add_special_tokens=False)[0]): 100},
        **body,
    }


CONVERSATIONS: list[dict[str, Any]] = [
    {},
    {"tools": [WEATHER, TIME]},
    {"tools": [TIME], "tool_choice": "none"},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"add_generation_prompt": False},
    {
        "messages": [*HELLO, {"role": "assistant", "content": "Well, I"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"messages": [{"role": "developer", "content": "Be brief."}, *HELLO]},
    {
        "messages": [
            {"role": "system", "content": "One."},
            {
                "role": "user",
                "name": "Ann",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "developer", "content": "Two."},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "hm",
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                    },
                    {"id": "2", "type": "function", "function": {"name": "time", "arguments": ""}},
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "noon"}]},
            {"role": "assistant", "content": "Sunny.", "reasoning_content": "so"},
            {"role": "user", "content": "Thanks"},
        ],
        "tools": [WEATHER, TIME],
    },
]


@pytest.mark.parametrize("body", CONVERSATIONS)
def test_prompts_are_those_of_vllms_server(engine: Any, tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    ours = prepared(tokenizer, body).requests.tokens[0].tolist()
    request = ChatCompletionRequest(**orjson.loads(orjson.dumps({"messages": HELLO, **body})))
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    params = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": False})
    tokenize = request.build_tok_params(engine._engine.model_config)
    _, (rendered,) = engine._engine.renderer.render_chat([request.messages], params, tokenize)
    assert ours == rendered["prompt_token_ids"], tokenizer.decode(ours, skip_special_tokens=False)


def test_a_required_tool_is_called(engine: Any, tokenizer: Tokenizer) -> None:
    forced = {"type": "function", "function": {"name": "weather"}}
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    required, named = answers(
        engine,
        prepared(
            tokenizer,
            thoughtless(tokenizer, tools=[strict], tool_choice="required", parallel_tool_calls=False),
            thoughtless(tokenizer, tools=[strict, TIME], tool_choice=forced, parallel_tool_calls=False),
        ),
    )
    for answer in (required, named):
        assert isinstance(answer, Completion), answer
        assert answer.message is not None
        (call,) = answer.message["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert orjson.loads(call["function"]["arguments"]) == {"city": "Rome"}
        assert answer.num_reasoning_tokens is not None
    assert (required.finish_reason, named.finish_reason) == ("tool_calls", "stop")


def test_calls_of_the_models_own_choice_are_read(engine: Any, tokenizer: Tokenizer) -> None:
    body = thoughtless(tokenizer, guided_choice=[CALL])
    called, told = answers(
        engine,
        prepared(
            tokenizer, {**body, "tools": [WEATHER]}, {**body, "tools": [WEATHER], "tool_choice": "none"}
        ),
    )
    assert isinstance(called, Completion), called
    assert called.message is not None
    assert [call["function"]["name"] for call in called.message["tool_calls"]] == ["weather"]
    assert called.finish_reason == "tool_calls"
    assert isinstance(told, Completion), told
    assert told.message is not None
    assert "tool_calls" not in told.message
    assert told.message["content"] == CALL
    assert told.finish_reason == "stop"


def test_reasoning_is_told_from_the_answer(engine: Any, tokenizer: Tokenizer) -> None:
    thinking, constrained, hidden = answers(
        engine,
        prepared(
            tokenizer,
            {"max_tokens": 8},
            thoughtless(tokenizer, guided_choice=["yes", "no"]),
            thoughtless(tokenizer, guided_choice=["yes", "no"], include_reasoning=False, logprobs=True),
        ),
    )
    assert isinstance(thinking, Completion), thinking
    assert thinking.message == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning": thinking.text,
    }
    assert isinstance(constrained, Completion), constrained
    assert constrained.message is not None
    assert constrained.message["content"] in ("yes", "no")
    assert constrained.text.startswith("</think>")
    assert isinstance(hidden, Completion), hidden
    assert hidden.message is not None
    assert hidden.message["reasoning"] is None
    assert hidden.logprobs is None
    assert hidden.text in ("yes", "no")  # as in vLLM's server, which then constrains from the first token on


def test_lines_run_with_their_adapter_and_share_no_kv_with_others(
    engine: Any, tokenizer: Tokenizer, make_tiny_adapter: Any, tmp_path: Path
) -> None:
    adapters = {
        "one": str(make_tiny_adapter(tmp_path / "one", seed=1)),
        "two": str(make_tiny_adapter(tmp_path / "two", seed=2)),
        "broken": str(tmp_path),
    }
    message = {"messages": [{"role": "user", "content": "word " * 80}], "max_tokens": 12}
    found = prepared(
        tokenizer,
        *({"model": model, **message} for model in ("tiny", "one", "two", "one", "broken")),
        adapters=adapters,
    )
    base, one, two, again, broken = answers(engine, found)
    for answer in (base, one, two):
        assert isinstance(answer, Completion), answer
    assert len({tuple(answer.token_ids) for answer in (base, one, two)}) == 3
    assert again.token_ids == one.token_ids
    assert [answer.num_cached_tokens for answer in (base, one, two)] == [0, 0, 0]
    assert isinstance(broken, Failure)
    assert (broken.code, broken.status_code) == ("invalid_request", 400)
    assert "'broken'" in broken.message
    (later,) = answers(engine, prepared(tokenizer, {"model": "one", **message}, adapters=adapters))
    assert later.num_cached_tokens >= 64  # whole blocks of 32
    (alone,) = answers(engine, prepared(tokenizer, {"model": "tiny", **message}, adapters=adapters))
    assert alone.token_ids == base.token_ids, "an adapter of its neighbours had to do with it"
    adapters["third"] = str(make_tiny_adapter(tmp_path / "third", seed=3))
    (third,) = answers(engine, prepared(tokenizer, {"model": "third", **message}, adapters=adapters))
    assert isinstance(third, Failure)
    assert "max_loras" in third.message


def write_tiny_idefics(path: Path, tokenizer_folder: Path) -> Path:
    """A model of random weights that sees an image as four tokens; vLLM's others need torchvision."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 56}, do_image_splitting=False
    )
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template
    )
    text_config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        vocab_size=49160,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    vision_config = transformers.Idefics3VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
    )
    config = transformers.Idefics3Config(
        vision_config=vision_config,
        text_config=text_config,
        scale_factor=2,
        image_token_id=processor.image_token_id,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.Idefics3ForConditionalGeneration(config).save_pretrained(path)
    processor.save_pretrained(path)
    return path


def image_part(colour: str) -> dict[str, Any]:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_go_to_the_model(vllm_model: Path, tmp_path: Path) -> None:
    from blendserve.engines.vllm import VLLMEngine

    path = write_tiny_idefics(tmp_path / "idefics", vllm_model)
    tokenizer = Tokenizer(path)
    text = {"type": "text", "text": "Which colour?"}

    def body(*parts: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 6, "logprobs": True}

    opened = VLLMEngine(
        path,
        COST_MODEL,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        dtype="float32",
        engine_args={"num_gpu_blocks_override": 33, "enforce_eager": True},
    )
    with closing(opened) as engine:
        found = prepared(
            tokenizer,
            body(text),
            body(image_part("red"), text),
            body(image_part("blue"), text),
            body(image_part("red"), text),
            body({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, text),
        )
        assert found.requests.raw is not None
        blind, red, blue, again, broken = answers(engine, found)
    for answer in (blind, red, blue, again):
        assert isinstance(answer, Completion), answer
    assert (
        blind.num_prompt_tokens < red.num_prompt_tokens == blue.num_prompt_tokens
    )  # the image and its marks more
    assert [token.logprob for token in red.logprobs] == pytest.approx([t.logprob for t in again.logprobs])
    assert [token.logprob for token in red.logprobs] != pytest.approx([t.logprob for t in blue.logprobs])
    assert isinstance(broken, Failure)


def test_parsers_that_vllm_does_not_have_are_named() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match="did you mean hermes"):
        EngineConfig(engine="vllm", tool_call_parser="hermez", enable_auto_tool_choice=True).check()
    with pytest.raises(ConfigError, match="--reasoning-parser qwen33"):
        EngineConfig(engine="vllm", reasoning_parser="qwen33").check()
