"""Embeddings over HTTP with the clients of OpenAI and Ollama, and their errors."""

import base64
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import ollama
import openai
import pytest

import localllm
from localllm import LLM, Embedder
from tests.llm.encoder_checkpoints import MEAN, make_encoder, sentence_transformer
from tests.server.attacks.wire import connect, request
from tests.server.conftest import serving

TEXTS = ["the cat sat", "a dog runs slowly on the red mat", "the cat sat"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    folder: Path = tmp_path_factory.mktemp("nomic")
    make_encoder(folder, "NomicBert")
    sentence_transformer(folder, MEAN, longest=24)
    with localllm.load_embedder(folder) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def url(embedder: Embedder) -> Iterator[str]:
    with serving(embedder) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def theirs(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(url) as client:
        yield client


def test_openai_gets_the_vectors_that_python_gets(client: openai.OpenAI, embedder: Embedder) -> None:
    """OpenAI's client requests base64 by default; both encodings contain the same numbers."""
    expected = embedder.embed(TEXTS)
    found = client.embeddings.create(model=embedder.name, input=TEXTS)
    plain = client.embeddings.create(model=embedder.name, input=TEXTS, encoding_format="float")
    for answer in (found, plain):
        assert np.array_equal(np.array([each.embedding for each in answer.data], np.float32), expected.vectors)
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert (answer.object, answer.model, answer.data[0].object) == ("list", embedder.name, "embedding")
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(expected.tokens)


def test_base64_is_little_endian_float32(url: str, embedder: Embedder) -> None:
    asked = {"model": embedder.name, "input": "the cat", "encoding_format": "base64"}
    told = httpx.post(f"{url}/v1/embeddings", json=asked).json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(told), "<f4"), embedder.embed("the cat").vectors[0])


def test_openai_takes_every_form_of_input(client: openai.OpenAI, embedder: Embedder) -> None:
    ids = [embedder.tokenizer.encode(text) for text in TEXTS]
    text = embedder.embed(TEXTS[0]).vectors
    for given in (TEXTS[0], [TEXTS[0]], ids[0], [ids[0]]):
        found = client.embeddings.create(model=embedder.name, input=given)
        assert np.array_equal(np.array([each.embedding for each in found.data], np.float32), text)
    short = client.embeddings.create(model=embedder.name, input=TEXTS, dimensions=5)
    expected = embedder.embed(TEXTS, dimensions=5).vectors
    assert np.array_equal(np.array([each.embedding for each in short.data], np.float32), expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, None),
        ({"input": [[]]}, None),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [[1, "a"]]}, "input"),
        ({"input": [10**9]}, None),
        ({"input": [-1]}, None),
        ({"input": {"text": "a"}}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": 0}, None),
        ({"input": "a", "dimensions": 49}, None),
        ({"input": "a", "dimensions": "5"}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "the cat " * 20}, None),
    ],
)
def test_openai_gets_invalid_input_errors(fields: Any, param: str | None, url: str, embedder: Embedder) -> None:
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": embedder.name, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and error["message"]


def test_a_text_that_is_too_long_is_an_error_of_openais(client: openai.OpenAI, embedder: Embedder) -> None:
    with pytest.raises(openai.BadRequestError) as told:
        client.embeddings.create(model=embedder.name, input="the cat " * 20)
    assert told.value.code == "context_length_exceeded"


def test_ollama_gets_the_vectors_that_python_gets(theirs: ollama.Client, embedder: Embedder) -> None:
    client, expected = theirs, embedder.embed(TEXTS)
    found = client.embed(embedder.name, TEXTS)
    assert np.array_equal(np.array(found.embeddings, np.float32), expected.vectors)
    assert found.prompt_eval_count == sum(expected.tokens)
    assert found.total_duration and found.load_duration and found.total_duration > found.load_duration > 0
    one = embedder.embed(TEXTS[1]).vectors
    assert np.array_equal(np.array(client.embed(embedder.name, TEXTS[1]).embeddings, np.float32), one)
    old = client.embeddings(embedder.name, TEXTS[1]).embedding
    assert np.array_equal(np.array(old, np.float32), one[0])
    short = client.embed(embedder.name, TEXTS, dimensions=5, keep_alive="5m", options={"temperature": 0.0})
    assert np.array_equal(np.array(short.embeddings, np.float32), embedder.embed(TEXTS, dimensions=5).vectors)


def test_ollama_truncates_long_input_unless_forbidden(url: str, theirs: ollama.Client, embedder: Embedder) -> None:
    client, long = theirs, "the cat " * 20
    told = httpx.post(f"{url}/api/embed", json={"model": embedder.name, "input": ["the", long]}).json()
    expected = embedder.embed(["the", long], truncate=True)
    assert np.array_equal(np.array(told["embeddings"], np.float32), expected.vectors)
    assert told["truncated"] == [0, 18] and told["prompt_eval_count"] == 3 + 24
    with pytest.raises(ollama.ResponseError, match="42 tokens") as refused:
        client.embed(embedder.name, long, truncate=False)
    assert refused.value.status_code == 400
    old = httpx.post(f"{url}/api/embeddings", json={"model": embedder.name, "prompt": long}).json()
    assert old["truncated"] == 18


def test_ollama_loads_a_model_by_an_empty_request(theirs: ollama.Client, embedder: Embedder) -> None:
    assert theirs.embed(embedder.name, "").embeddings == []
    assert theirs.embed(embedder.name, []).embeddings == []
    assert theirs.embeddings(embedder.name, "").embedding == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("embed", {"input": 5}),
        ("embed", {"input": ["a", ""]}),
        ("embed", {"input": ["a", 5]}),
        ("embed", {"input": ["a"] * 2049}),
        ("embed", {"input": "a", "dimensions": -1}),
        ("embed", {"input": "a", "truncate": "yes"}),
        ("embed", {"input": "a", "keep_alive": "soon"}),
        ("embed", {"input": "a", "keep_alive": True}),
        ("embed", {"input": "a", "options": {"num_ctx": "many"}}),
        ("embeddings", {"prompt": ["a"]}),
    ],
)
def test_ollama_gets_errors_for_invalid_input(path: str, fields: Any, url: str, embedder: Embedder) -> None:
    answer = httpx.post(f"{url}/api/{path}", json={"model": embedder.name, **fields})
    assert answer.status_code == 400 and isinstance(answer.json()["error"], str)


def test_a_missing_model_is_reported_in_the_form_of_each_api(theirs: ollama.Client, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nobody/nothing", input="a")
    with pytest.raises(ollama.ResponseError, match="model 'nobody/nothing' not found"):
        theirs.embed("nobody/nothing", "a")


def test_an_embedder_does_not_chat(embedder: Embedder, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support chat"):
        client.chat.completions.create(model=embedder.name, messages=[{"role": "user", "content": "a"}])
    assert embedder.name in [model.id for model in client.models.list()]


def test_any_decoder_embeds(stories: LLM, stories_url: str) -> None:
    texts = ["Once upon a time", "Lily went to the park"]
    with ollama.Client(stories_url) as client:
        found = client.embed(stories.name, texts)
    expected = stories.embed(texts).vectors
    assert np.abs(np.array(found.embeddings, np.float32) - expected).max() < 1e-6


def test_abandoned_embeddings_are_not_computed(
    url: str, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, compute = list[int](), embedder.embed_batch

    def counted(token_ids: Sequence[Sequence[int]]) -> np.ndarray:
        begun.append(len(token_ids))
        time.sleep(0.2)
        return compute(token_ids)

    monkeypatch.setattr(embedder, "embed_batch", counted)
    body = {"model": embedder.name, "input": ["the cat sat on the mat"] * 2000}
    message = request("POST", "/v1/embeddings", body=json.dumps(body).encode())
    with connect(url) as connection:
        connection.sendall(message)
        while not begun:
            time.sleep(0.01)
    left = 0
    while len(begun) != left:  # it ends soon after the connection has
        left = len(begun)
        time.sleep(0.5)
    assert 0 < sum(begun) < 2000


def test_invalid_bodies_change_nothing(url: str) -> None:
    for body in (b"", b"[]", b"{", b'{"input": "\\ud800", "model": "x"}', json.dumps({"model": 5}).encode()):
        for path in ("v1/embeddings", "api/embed", "api/embeddings"):
            assert httpx.post(f"{url}/{path}", content=body).status_code == 400


def test_num_ctx_is_as_much_as_the_model_knows(url: str, embedder: Embedder) -> None:
    asked = {"model": embedder.name, "input": "a cat", "options": {"num_ctx": 10**6}}
    assert httpx.post(f"{url}/api/embed", json=asked).status_code == 200
    assert embedder.context == embedder.config.max_context
    told = httpx.post(f"{url}/api/embed", json=asked | {"options": {"num_ctx": 0}})
    assert told.status_code == 400 and "num_ctx" in told.json()["error"]


def test_tokens_of_an_encoder_are_counted(url: str, embedder: Embedder) -> None:
    asked = {"model": embedder.name, "prompt": "a cat"}
    found = httpx.post(f"{url}/v1/tokenize", json=asked).json()
    assert found["tokens"] == embedder.tokenizer.encode("a cat") and found["count"] == len(found["tokens"])
    asked = {"model": embedder.name, "tokens": found["tokens"]}
    assert "cat" in httpx.post(f"{url}/v1/detokenize", json=asked).json()["prompt"]
    chat = {"model": embedder.name, "messages": [{"role": "user", "content": "a cat"}]}
    assert httpx.post(f"{url}/v1/tokenize", json=chat).status_code == 400
