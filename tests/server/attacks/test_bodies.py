"""Expensive bodies: too large, too deep, of wrong types, with absurd numbers and counts."""

import json

import pytest

from localllm.api.body import MAX_STOP_CHARACTERS, MAX_STOP_IDS, MAX_STOPS
from tests.server.attacks.wire import COMPLETION, completion_request, exchange, request

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
WRONG = ("x", "", True, 1.5, -1, 10**30, 1e308, [], {}, [None], {"a": None})
"""Values for most fields; the few that are valid are answered."""

FIELDS = {
    "/v1/chat/completions": (
        *("model", "messages", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "seed", "max_tokens", "max_completion_tokens", "stop", "n"),
        *("stop_token_ids", "ignore_eos", "stream", "stream_options", "logprobs", "top_logprobs", "tools"),
        *("tool_choice", "response_format", "reasoning_effort", "chat_template_kwargs", "user", "metadata"),
    ),
    "/v1/completions": ("model", "prompt", "echo", "logprobs", "best_of", "suffix", "stop", "n", "max_tokens"),
}


def schema(content):
    return FORMAT | {"json_schema": {"name": "x", "schema": content}}


def nested(levels):
    found = {"type": "string"}
    for _ in range(levels):
        found = {"type": "array", "items": found}
    return found


def told(url, path, body):
    return exchange(url, request("POST", path, body=json.dumps(body).encode()))


@pytest.mark.parametrize(("path", "field"), [(path, field) for path in FIELDS for field in FIELDS[path]])
def test_wrong_types_in_every_field(demo_url, path, field):
    right = CHAT if "chat" in path else COMPLETION
    for value in WRONG:
        body = right | {field: value} if field == "max_tokens" else {"max_tokens": 2} | right | {field: value}
        said = told(demo_url, path, body)
        assert said.status in (200, 400, 404), (field, value, said.body)
        if said.status != 200:
            assert len(said.message) < 600 and "\n" not in said.message


@pytest.mark.parametrize(
    ("path", "changes", "field", "limit"),
    [
        ("/v1/completions", {"prompt": ["x"] * 129}, "prompt", "128"),
        ("/v1/completions", {"stop": ["x"] * 1000}, "stop", "64"),
        ("/v1/completions", {"stop": ["x" * 1025]}, "stop", "1,024"),
        ("/v1/completions", {"stop_token_ids": [1] * 1025}, "stop_token_ids", "1,024"),
        ("/v1/completions", {"logit_bias": {str(token): 1 for token in range(4097)}}, "logit_bias", "4,096"),
        ("/v1/completions", {"logit_bias": {"1" * 5000: 1}}, "logit_bias", "ids"),
        ("/v1/completions", {"logprobs": 1000}, "logprobs", ""),
        ("/v1/completions", {"max_tokens": 2**31}, "max_tokens", "2,147,483,647"),
        ("/v1/completions", {"max_tokens": 10**400}, "max_tokens", ""),
        ("/v1/completions", {"max_tokens": 1e30}, "max_tokens", "integer"),
        ("/v1/completions", {"seed": 2**63}, "seed", "9,223,372,036,854,775,807"),
        ("/v1/completions", {"n": 10**6}, "n", ""),
        ("/v1/completions", {"best_of": 10**6}, "best_of", ""),
        ("/v1/chat/completions", {"n": 10**30}, "n", ""),
        ("/v1/chat/completions", {"n": 1e30}, "n", ""),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 10**6}, "logprobs", ""),
        ("/v1/chat/completions", {"messages": CHAT["messages"] * 4097}, "messages", "4,096"),
        ("/v1/chat/completions", {"tools": [TOOL] * 129}, "tools", "128"),
        ("/v1/chat/completions", {"chat_template_kwargs": dict.fromkeys(map(str, range(65)))}, "kwargs", "64"),
        ("/v1/chat/completions", {"response_format": schema(nested(65))}, "nested", "64"),
        ("/v1/chat/completions", {"response_format": schema({"enum": ["x" * 2**18]})}, "schema", "262,144"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}]},
            "messages.0.content",
            "1,024",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}] * 9}]},
            "image_url",
            "",
        ),
    ],
)
def test_more_than_a_limit_is_refused_with_the_name_of_the_field(demo_url, path, changes, field, limit):
    said = told(demo_url, path, (CHAT if "chat" in path else COMPLETION) | changes)
    assert said.status == 400
    assert field in said.message and limit in said.message
    assert len(said.message) < 300


def test_requests_at_the_limits_are_answered(demo_url):
    stop = [chr(0x4E00 + place) * MAX_STOP_CHARACTERS for place in range(MAX_STOPS)]
    bias = {str(token): 0 for token in range(200)}
    said = exchange(demo_url, completion_request(stop=stop, logit_bias=bias, stop_token_ids=[1] * MAX_STOP_IDS))
    assert said.status == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' * 100_000,
        b"[" * 10_000_000,
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b'{"model": "demo", "prompt": "x", "model": "other"}',
        b'{"model": "demo", "prompt": "x", "temperature": NaN}',
        b'{"model": "demo", "prompt": "x", "temperature": -Infinity}',
        b'{"model": "demo", "prompt": "x", "temperature": 1e999}',
        b'{"model": "demo", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "demo", "prompt": "\\ud800"}',
        b'{"model": "demo", "prompt": "\xed\xa0\x80"}',
        b"\x1f\x8b\x08\x00" + b"\0" * 1000,
        "{}".encode("utf-16"),
        b'{"model": "demo", "prompt": "x"}{}',
        b"null",
        b'"' + b"x" * 1_000_000 + b'"',
    ],
    ids=lambda body: str(body[:40]),
)
def test_json_that_is_none_or_that_two_readers_understand_differently(demo_url, body):
    said = exchange(demo_url, request(body=body))
    assert said.status == 400 and len(said.message) < 300


def test_ten_thousand_keys_and_large_numbers_of_digits_are_read_in_time(demo_url):
    """Covers hash collisions, and numbers whose parsing takes quadratic time."""
    said = told(demo_url, "/v1/completions", COMPLETION | {f"x{number}": number for number in range(100_000)})
    assert said.status == 200 and len(str(said.headers)) < 1000
