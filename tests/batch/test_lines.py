"""Input and output lines in the form of OpenAI's batches."""

import json
from typing import Any

import pytest
from openai.types.batch_error import BatchError

from localllm.batch.job import SeenIds
from localllm.batch.lines import BatchLine, read_line
from localllm.errors import ContextOverflow, UsageError
from localllm.request import SamplingParams

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}


def read(text: Any, number: int = 1, seed: int = 0) -> BatchLine:
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    return read_line(raw, number, seed, lambda _: True)


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b'{"custom_id": "a", "custom_id": "b"}', "invalid_json_line", None),
        ({k: v for k, v in GOOD.items() if k != "custom_id"}, "missing_required_parameter", "custom_id"),
        (GOOD | {"custom_id": 5}, "missing_required_parameter", "custom_id"),
        (GOOD | {"custom_id": ""}, "missing_required_parameter", "custom_id"),
        ({k: v for k, v in GOOD.items() if k != "method"}, "missing_required_parameter", "method"),
        (GOOD | {"method": "GET"}, "invalid_method", "method"),
        (GOOD | {"url": "/v1/embeddings"}, "invalid_url", "url"),
        (GOOD | {"body": "x"}, "missing_required_parameter", "body"),
        (GOOD | {"priority": 1}, "unknown_parameter", "priority"),
    ],
)
def test_an_invalid_line_reports_the_reason(text: Any, code: str, param: str | None) -> None:
    line = read(text, 17)
    assert line.error is not None
    answer = line.invalid_line_object(line.error)
    assert answer["response"] is None
    error = BatchError.model_validate(answer["error"])
    assert (error.code, error.param, error.line) == (code, param, 17)
    assert answer["custom_id"] == (
        text.get("custom_id") or None if isinstance(text, dict) and param != "custom_id" else None
    )


def test_a_failed_request_has_the_error_body_of_http() -> None:
    answer = read(GOOD).failure_object(ContextOverflow(100, 64, "give --context 200"))
    assert answer["error"] is None and answer["custom_id"] == "a"
    assert answer["response"]["status_code"] == 400
    assert answer["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_the_second_of_two_ids_is_at_fault_and_has_a_key_of_its_own() -> None:
    seen = SeenIds()
    raw = json.dumps(GOOD).encode()
    first, second = (read_line(raw, number, 0, seen.add) for number in (1, 2))
    assert first.error is None
    assert second.error is not None and second.error.code == "duplicate_custom_id"
    assert first.line_id != second.line_id
    seen.close()


def test_a_line_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.batch.lines.MAX_LINE_BYTES", 20)
    fault = read(b" " * 21).error
    assert fault is not None and "longer than 20 bytes" in fault.message


def test_seeds_follow_from_the_id_and_the_batch_alone() -> None:
    assert read(GOOD, 1).seed == read(GOOD, 900).seed
    assert len({read(GOOD).seed, read(GOOD, seed=1).seed, read(GOOD | {"custom_id": "b"}).seed}) == 3
    assert all(0 <= read(GOOD, seed=seed).seed < 2**53 for seed in range(50))
    body = {"messages": [{"role": "user", "content": "x"}]}
    asked = read(GOOD | {"body": body}).parse_request("demo", SamplingParams())
    assert (asked.params.seed, asked.model) == (read(GOOD).seed, "demo")
    named = read(GOOD | {"body": body | {"seed": 7, "model": "gpt-4o"}}).parse_request("demo", SamplingParams())
    assert (named.params.seed, named.model) == (7, "demo")


def test_a_stream_is_refused() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with pytest.raises(UsageError, match="a batch cannot be streamed"):
        read(GOOD | {"body": body}).parse_request("demo", SamplingParams())
