"""Function calls of random models through OpenAI's own client."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

import localllm
from localllm import LLM
from tests.scripted import CHATML, write_scripted
from tests.server.conftest import serving
from tests.text.grammar.conftest import DEMO
from tests.tiny import make_checkpoint

HELLO: list[Any] = [{"role": "user", "content": "How is the weather?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NEWS: dict[str, Any] = {
    "type": "object",
    "properties": {"topics": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2}},
    "required": ["topics"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "get_news": NEWS}


def tool(name: str, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], **more}}


TOOLS = [tool("weather"), tool("get_news")]


@pytest.fixture(scope="module")
def ignorant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Random weights with the tokenizer of `demo` and a template with Hermes tool calls."""
    folder = tmp_path_factory.mktemp("ignorant")
    make_checkpoint(
        folder, "Llama", vocab_size=3072, eos_token_id=4, num_hidden_layers=2, max_position_embeddings=2048
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    (folder / "chat_template.jinja").write_text(CHATML.replace("<think> ", ""))
    with localllm.load(folder, device="cpu", context=2048) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(ignorant: LLM) -> Iterator[openai.OpenAI]:
    with serving(ignorant) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(llm: LLM, **more: Any) -> dict[str, Any]:
    """Body of a request with a bias towards closing tokens, so that answers end."""
    closers = {'"', "}", '"}', "]", "</"}
    tokens = llm.tokenizer.token_bytes(llm.config.vocab_size)
    bias = {str(i): 6 for i, token in enumerate(tokens) if token.decode(errors="replace").strip() in closers}
    bias |= {str(token): 8 for token in llm.eos_ids}
    return {"model": llm.name, "messages": HELLO, "max_tokens": 400, "logit_bias": bias, "tools": TOOLS, **more}


def are_valid(calls: Any) -> bool:
    return all(
        jsonschema.Draft202012Validator(SCHEMAS[call.function.name]).is_valid(json.loads(call.function.arguments))
        for call in calls
    )


def test_required_calls_are_made_and_satisfy_their_schemas(client: openai.OpenAI, ignorant: LLM) -> None:
    names, several = set[str](), 0
    for seed in range(20):
        done = client.chat.completions.create(
            **asked(ignorant, tool_choice="required", seed=seed, temperature=8.0 if seed % 2 else 2.0)
        )
        [choice] = done.choices
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert choice.message.tool_calls and are_valid(choice.message.tool_calls)
        assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)
        names |= {call.function.name for call in choice.message.tool_calls if call.type == "function"}
        several += len(choice.message.tool_calls) > 1
    assert names == SCHEMAS.keys() and several


def test_a_named_function_is_called_once_where_calls_are_not_parallel(
    client: openai.OpenAI, ignorant: LLM
) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_news"}}
    for seed in range(6):
        done = client.chat.completions.create(
            **asked(ignorant, tool_choice=choice, parallel_tool_calls=False, seed=seed, stream=False)
        )
        calls = done.choices[0].message.tool_calls
        assert done.choices[0].finish_reason == "stop"
        # type: ignore[union-attr].
        assert calls and [call.function.name for call in calls] == ["get_news"] and are_valid(calls)


def test_only_allowed_tools_are_called(client: openai.OpenAI, ignorant: LLM) -> None:
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    done = client.chat.completions.create(
        **asked(ignorant, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}, seed=1)
    )
    # type: ignore[union-attr].
    assert {call.function.name for call in done.choices[0].message.tool_calls or ()} == {"weather"}


def test_calls_are_streamed_for_the_client_that_collects_them(client: openai.OpenAI, ignorant: LLM) -> None:
    fields = asked(ignorant, tool_choice="required", seed=3)
    whole = client.chat.completions.create(**fields).choices[0]
    strict = [tool(name, strict=True) for name in SCHEMAS]
    with client.chat.completions.stream(**{**fields, "tools": strict}) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert found.finish_reason == whole.finish_reason == "tool_calls"
    # type: ignore[union-attr].
    told = [[(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
            for choice in (whole, found)]  # fmt: skip
    assert told[0] == told[1]


def test_unsupported_schemas_are_refused_with_the_function(client: openai.OpenAI, ignorant: LLM) -> None:
    unkept = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(
        openai.BadRequestError, match=r"the function f cannot be constrained: the schema's not at #"
    ):
        client.chat.completions.create(**asked(ignorant, tools=[unkept], tool_choice="required"))
    assert client.chat.completions.create(**asked(ignorant, tools=[unkept], max_tokens=3)).choices


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_model_without_markup_of_calls_can_be_made_to_call(demo_url: str, demo: LLM, choice: Any) -> None:
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client:
        done = client.chat.completions.create(**asked(demo, tool_choice=choice, seed=1))
        assert done.choices[0].message.tool_calls and are_valid(done.choices[0].message.tool_calls)
        with pytest.raises(openai.BadRequestError, match="does not read tools"):
            client.chat.completions.create(**asked(demo, tool_choice="auto"))


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model that writes text, and then a call with arguments of the wrong type."""
    call = '{"name": "weather", "arguments": {"city": 5, "unit": "kelvin"}}'
    folder = write_scripted(tmp_path_factory.mktemp("caller") / "caller", ["Let me see.", "<tool_call>\n", call])
    with localllm.load(folder, device="cpu") as llm:
        yield llm


CALLS, SAYS = ("<", ">"), ("{", "}")  # how the two begin and end; the grammar leaves little between them


@pytest.mark.parametrize("script", [CALLS, SAYS])
def test_with_a_schema_the_answer_is_a_call_or_valid_json(tmp_path: Path, script: tuple[str, ...]) -> None:
    """Covers every API, with a model that writes a call and one that writes JSON."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    function: dict[str, Any] = {"name": "f", "strict": True}
    functions: Any = [{"type": "function", "function": function}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    none = {"type": "object", "additionalProperties": False}
    theirs: Any = [{"name": "f", "strict": True, "input_schema": none}]
    limit, called, said = 100, list[str](), list[str]()
    with localllm.load(write_scripted(tmp_path / "m", script), device="cpu") as llm, serving(llm) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            message = (
                client.chat.completions.create(
                    model="m", messages=HELLO, tools=functions, response_format=form, max_tokens=limit
                )
                .choices[0]
                .message
            )
            called += [call.function.name for call in message.tool_calls or () if call.type == "function"]
            said += filter(None, [message.content])
            response = client.responses.create(
                model="m", input="x", tools=[{"type": "function", **function}], text=text, max_output_tokens=limit
            )
            called += [item.name for item in response.output if item.type == "function_call"]
            said += filter(None, [response.output_text])
        import anthropic  # takes a second

        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
            config: Any = {"format": {"type": "json_schema", "schema": schema}}
            done = claude.messages.create(
                model="m", messages=HELLO, tools=theirs, output_config=config, max_tokens=limit
            )
            called += [block.name for block in done.content if block.type == "tool_use"]
            said += [block.text for block in done.content if block.type == "text"]
        asked = {"model": "m", "messages": HELLO, "tools": functions, "format": schema, "stream": False}
        answer = httpx2.post(f"{url}/api/chat", json=asked).json()[
            "message"
        ]  # whose client knows no strict functions
        called += [call["function"]["name"] for call in answer.get("tool_calls", ())]
        said += filter(None, [answer["content"]])
    assert (called, said) == ((["f"] * 4, []) if script is CALLS else ([], ['{"ok":false}'] * 4))


def test_a_strict_function_gets_valid_arguments(caller: LLM) -> None:
    with serving(caller) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"model": caller.name, "messages": HELLO, "temperature": 1, "seed": 2}
        tools = [tool("weather", strict=True)]
        held = client.chat.completions.create(**fields, tools=tools, max_tokens=600).choices[0]
        free = client.chat.completions.create(**fields, tools=[tool("weather")], max_tokens=3).choices[0]
    assert free.message.content and free.message.content.startswith("Let me see.")
    assert held.message.content == "Let me see." and held.finish_reason == "tool_calls"
    assert held.message.tool_calls and are_valid(held.message.tool_calls)
