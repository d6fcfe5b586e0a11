"""The OpenAPI document is complete, and the API conforms to it."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from localllm.llm.llm import LLM
from localllm.server.slots import SlotFiles
from tests.server.conftest import serving

LIMIT = {  # of an answer's length, by route
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
# Changing what is on this machine, or asking others, is for tests with a machine of their own.
NOT_HERE = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/{digest}")
SLOW = list(HealthCheck)  # no example is too large or takes too long
EXAMPLES = 12  # of each route and kind


@pytest.fixture(scope="module")
def document(demo_url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{demo_url}/openapi.json") as answer:
        return json.load(answer)


def references(value: Any) -> set[str]:
    """Yield all references at any depth."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set[str]()
        return own.union(*map(references, value.values()))
    return set[str]().union(*map(references, value)) if isinstance(value, list) else set()


def test_every_reference_is_in_the_document(document: dict[str, Any]) -> None:
    for reference in references(document):
        found: Any = document
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
    assert document["openapi"].startswith("3.1")


def test_every_error_of_a_body_is_described(document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            described = {"200", "400", "403", "404", "500", "503"}
            described |= {"408", "413", "507"} if "requestBody" in operation else set()
            assert described <= operation["responses"].keys(), f"{method} {path}"
            assert "422" not in operation["responses"]


def test_every_body_is_described(document: dict[str, Any]) -> None:
    without = {"/api/push", "/api/blobs/{digest}"}  # nothing is read of the one, and the other's is a file
    posted = {path: item["post"] for path, item in document["paths"].items() if "post" in item}
    assert {path for path, operation in posted.items() if "requestBody" not in operation} == without


def short(body: Any, path: str) -> Any:
    """Change the body to use the loaded model, which stays loaded, and few tokens."""
    if not isinstance(body, dict):
        return body
    few: dict[str, Any] = {name: 2 for name in {*LIMIT.values(), "max_completion_tokens"} & body.keys()}
    few |= {"options": {"num_predict": 2}} if "options" in body else {}
    limit = {LIMIT[path]: 2} if path in LIMIT else {}
    found = {**limit, **body, **few, "model": "demo"}
    found.pop("keep_alive", None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_responses_match_the_openapi_document(demo: LLM, tmp_path: Path, mode: str) -> None:
    """Sends valid and invalid requests to the real server, none of which may cause an internal error."""
    with serving(demo, slot_files=SlotFiles(tmp_path)) as url:
        check_responses(url, mode)


def check_responses(url: str, mode: str) -> None:
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in NOT_HERE or (mode == "negative" and not operation.body):
            continue
        answered = statuses(operation, mode)
        if mode == "positive" and operation.path in LIMIT:
            assert 200 in answered, f"nothing that {operation.label} describes is answered"


def statuses(operation: Any, mode: str) -> set[int]:
    """Status codes of many generated requests, each of which is checked."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    every = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    ]
    found = set[int]()

    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=SLOW)
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case: Any) -> None:
        if mode == "positive":
            case.body = short(case.body, case.path)
        elif isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body = {**case.body, "model": "demo"}
        answer = case.call()
        found.add(answer.status_code)
        case.validate_response(answer, checks=every)

    ask()
    return found
