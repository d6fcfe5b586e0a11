"""The document that describes the API is whole, and the API is what it says."""

import json
import urllib.request
from typing import Any

import pytest


@pytest.fixture(scope="module")
def document(demo_url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{demo_url}/openapi.json") as answer:
        return json.load(answer)


def references(value: Any) -> set[str]:
    """All of them, wherever they stand."""
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
