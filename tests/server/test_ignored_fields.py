"""Unsupported fields are ignored and named, or rejected with `--strict`, in the bodies of real clients."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from localllm import LLM
from localllm.server.logs import IGNORED_HEADER
from tests.server.conftest import serving

HI = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "demo", "messages": HI, "max_tokens": 2}
OLLAMA = {"model": "demo", "messages": HI, "stream": False, "options": {"num_predict": 2}}
ANTHROPIC = {"model": "demo", "messages": HI, "max_tokens": 2}
RESPONSE = {"model": "demo", "input": "Hi", "max_output_tokens": 16}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS}

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, "wings": 2}, "wings"),
    ("/v1/chat/completions", {**CHAT, "dry_multiplier": 0.8}, "dry_multiplier;changes-answer"),
    ("/v1/chat/completions", {**CHAT, "messages": [{**HI[0], "weight": 1}, {**HI[0], "weight": 2}]},
     "messages[].weight"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [
        {"type": "text", "text": "Hi", "annotations": []}]}]}, "messages[].content[].annotations"),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "web_search"}]}, "tools[].web_search;changes-answer"),
    ("/v1/chat/completions", {**CHAT, "reasoning_effort": "high"}, "reasoning_effort;changes-answer"),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"enable_thinking": True, "x": 1}},
     "chat_template_kwargs.enable_thinking;changes-answer, chat_template_kwargs.x;changes-answer"),
    ("/v1/chat/completions", {**CHAT, "enable_thinking": False}, ""),
    ("/v1/chat/completions", {**CHAT, "verbosity": "low", "store": True}, "verbosity;changes-answer, store"),
    ("/v1/chat/completions", {**CHAT, 'x"\r\nSet-Cookie: a': 1, "é": 2, "": 3},
     "x???Set-Cookie:?a, ?, ?"),
    ("/v1/completions", {"model": "demo", "prompt": "Hi", "max_tokens": 2, "wings": 2}, "wings"),
    ("/v1/responses", {**RESPONSE, "wings": 2}, "wings"),
    ("/v1/responses", {**RESPONSE, "include": ["web_search_call.action.sources"]},
     "include.web_search_call.action.sources"),
    ("/v1/responses", {**RESPONSE, "text": {"verbosity": "low"}}, "text.verbosity;changes-answer"),
    ("/v1/responses", {**RESPONSE, "tools": [{"type": "image_generation"}]},
     "tools[].image_generation;changes-answer"),
    ("/v1/embeddings", {"model": "demo", "input": "Hi", "input_type": "query"}, "input_type"),
    ("/v1/messages", {**ANTHROPIC, "mcp_servers": [{"type": "url"}]}, "mcp_servers;changes-answer"),
    ("/v1/messages", {**ANTHROPIC, "context_management": {"edits": []}}, "context_management;changes-answer"),
    ("/v1/messages", {**ANTHROPIC, "thinking": {"type": "enabled", "budget_tokens": 1024}},
     "thinking.budget_tokens;changes-answer, thinking;changes-answer"),
    ("/v1/messages", {**ANTHROPIC, "tools": [{"type": "bash_20250124", "name": "bash"}]},
     "tools[].bash_20250124;changes-answer"),
    ("/api/chat", {**OLLAMA, "max_output_tokens": 2}, "max_output_tokens;changes-answer"),
    ("/api/chat", {**OLLAMA, "options": {"num_predict": 2, "wings": 3, "mirostat": 2}},
     "options.wings;changes-answer, options.mirostat;changes-answer"),
    ("/api/chat", {**OLLAMA, "messages": [{"role": "user", "content": "Hi", "parts": []}]}, "messages[].parts"),
    ("/api/generate", {"model": "demo", "prompt": "Hi", "stream": False, "options": {"num_predict": 2}, "x": 1},
     "x"),
    ("/api/embed", {"model": "demo", "input": "Hi", "x": 1}, "x"),
    ("/api/show", {"model": "demo", "x": 1}, "x"),
]  # fmt: skip


@pytest.fixture(scope="module")
def strict_url(demo: LLM) -> Iterator[str]:
    with serving(demo, strict=True) as url:
        yield url


@pytest.mark.parametrize(("path", "body", "named"), CASES)
def test_ignored_fields_are_named_or_rejected(
    demo_url: str, strict_url: str, path: str, body: dict[str, Any], named: str
) -> None:
    answer = httpx2.post(demo_url + path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(IGNORED_HEADER, "") == named.replace(":", "?")
    assert httpx2.post(strict_url + path, json=body).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "temperature": "1"}),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": 5}]}),
        ("/v1/chat/completions", {**CHAT, "guided_json": 5}),
        ("/v1/chat/completions", {**CHAT, "guided_regex": "a", "guided_choice": ["a"]}),
        ("/v1/responses", {**RESPONSE, "truncation": "middle"}),
        ("/v1/messages", {**ANTHROPIC, "thinking": {"type": "much"}}),
        ("/api/chat", {**OLLAMA, "options": {"temperature": "warm"}}),
        ("/api/chat", {**OLLAMA, "temperature": "warm"}),
    ],
)  # fmt: skip
def test_a_known_field_with_an_invalid_value_is_rejected(demo_url: str, path: str, body: dict[str, Any]) -> None:
    answer = httpx2.post(demo_url + path, json={**body, "wings": 2})
    assert answer.status_code == 400 and answer.headers[IGNORED_HEADER] == "wings"


def test_the_stream_of_an_answer_has_the_header(demo_url: str) -> None:
    with httpx2.stream("POST", f"{demo_url}/v1/chat/completions", json={**CHAT, "stream": True, "x": 1}) as answer:
        assert answer.headers[IGNORED_HEADER] == "x"


def test_a_body_of_many_unknown_fields_is_read_and_some_are_named(demo_url: str) -> None:
    many = {f"field{number}": number for number in range(50_000)}
    answer = httpx2.post(f"{demo_url}/v1/chat/completions", json={**CHAT, **many}, timeout=20)
    assert answer.status_code == 200
    assert len(answer.headers[IGNORED_HEADER].split(", ")) == 32


def test_each_client_has_one_line_of_the_log_for_each_field(demo: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "localllm.requests")
    with serving(demo) as url:
        for program, fields in (
            ("a/1", {"x": 1}),
            ("a/1", {"x": 1}),
            ("b/1", {"x": 1}),
            ("a/1", {"x": 1, "n_z": 1}),
        ):
            body = {**CHAT, **fields}
            httpx2.post(f"{url}/v1/chat/completions", json=body, headers={"User-Agent": program})
    records = [getattr(record, "fields", {}) for record in caplog.records]
    ignored = [(line["program"], line["fields"]) for line in records if line.get("event") == "ignored"]
    lines = [line for line in ignored if line[0] in ("a/1", "b/1")]  # a server of another test may still write
    assert lines == [("a/1", "x"), ("b/1", "x"), ("a/1", "n_z;changes-answer")]
    assert [record.levelname for record in caplog.records if record.message == "ignored"][-1] == "WARNING"


def test_fields_of_other_servers_take_effect(demo_url: str) -> None:
    def ask(path: str, **fields: Any) -> Any:
        body = {"model": "demo", "messages": HI, "temperature": 0, "stream": False, **fields}
        body = {name: value for name, value in body.items() if value is not None}
        answer = httpx2.post(demo_url + path, json=body)
        assert answer.status_code == 200, answer.text
        assert IGNORED_HEADER not in answer.headers
        return answer.json()

    def said(**fields: Any) -> str:
        return ask("/v1/chat/completions", **{"max_tokens": 12, **fields})["choices"][0]["message"]["content"]

    assert said(max_tokens=None, n_predict=12) == said()
    assert said(repeat_penalty=5.0) == said(repetition_penalty=5.0) != said()
    assert said(cache_prompt=True, id_slot=3, seed=-1, top_k=-1) == said()
    choices = {"guided_choice": ["purr", "meow"], "structured_outputs": {"choice": ["purr", "meow"]}}
    for name, value in choices.items():
        assert said(**{name: value}) in ("purr", "meow")
    for name in ("guided_regex", "structured_outputs"):
        pattern = "[0-9]{3}"
        assert said(**{name: {"regex": pattern} if name == "structured_outputs" else pattern}).isdecimal()
    assert said(grammar='root ::= "a" "b"') == said(guided_grammar='start: "a" "b"') == "ab"
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    for fields in (
        {"json_schema": schema},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
        {"response_format": {"type": "json_object", "schema": schema}},
    ):
        assert json.loads(said(**fields, max_tokens=40)) == {"a": 1}
    cached = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
    ]
    assert said(messages=cached) == said()
    begun = [*HI, {"role": "assistant", "content": "Once upon a"}]
    goes_on = said(messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert goes_on == said(messages=[*HI, {**begun[1], "prefix": True}]) != said(messages=begun)
    claude = ask("/v1/messages", messages=begun, max_tokens=12)
    assert claude["content"][0]["text"] == goes_on

    plain = ask("/api/chat", options={"num_predict": 12, "temperature": 0})
    beside = ask("/api/chat", num_predict=12, keep_alive="-1", messages=[{**HI[0], "id": "1", "name": "Ann"}])
    assert beside["message"] == plain["message"] and beside["eval_count"] == plain["eval_count"]
