"""Defaults for a missing model name and a missing chat template."""

import asyncio
from collections.abc import Iterator

import httpx2
import ollama
import openai
import pytest

from localllm import LLM
from localllm.api.body import BadField
from localllm.server.lease import FALLBACK_TEMPLATE
from localllm.server.logs import TEMPLATE_HEADER
from localllm.server.models import ModelPool
from localllm.server.routing import only_model
from localllm.text.template import ChatTemplate
from tests.server.conftest import refuse_to_load

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2, "model": ""}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "model": None}),
        ("/v1/messages", {"messages": HI, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/tokenize", {"prompt": "Hi"}),
        ("/api/chat", {"messages": HI, "stream": False, "options": {"num_predict": 2}}),
        ("/api/generate", {"prompt": "Hi", "stream": False, "options": {"num_predict": 2}}),
        ("/api/embed", {"input": "Hi"}),
    ],
)
def test_without_a_name_the_only_model_is_used(demo_url: str, path: str, body: object) -> None:
    answer = httpx2.post(demo_url + path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", "demo") == "demo"


def test_without_a_name_none_or_several_models_are_an_error(demo: LLM, stories: LLM) -> None:
    async def names() -> None:
        models = ModelPool(refuse_to_load)
        with pytest.raises(BadField, match="no model is loaded"):
            only_model(models)
        for llm in (demo, stories):
            models.aliases[llm.name] = str(llm.path)
            models.add(llm.name, llm)
        with pytest.raises(BadField, match="demo, stories260K are loaded"):
            only_model(models)

    asyncio.run(names())


@pytest.fixture(scope="module")
def plain() -> Iterator[ChatTemplate]:
    template = ChatTemplate({"default": FALLBACK_TEMPLATE}, special_tokens={"bos_token": "<s>"})
    yield template
    template.close()


def test_the_fallback_template_writes_roles(plain: ChatTemplate) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Well?"},
    ]
    assert plain.render(messages).text == "<s>Be short.\nUser: Hi\nAssistant: Hello\nUser: Well?\nAssistant:"


def test_a_model_without_a_template_uses_the_fallback(stories_url: str, stories: LLM) -> None:
    """Covers every API; a header reports the fallback, and raw completions need none."""
    import anthropic  # takes a second

    name = stories.name
    answer = httpx2.post(
        f"{stories_url}/v1/chat/completions", json={"model": name, "messages": HI, "max_tokens": 5}
    )
    assert (answer.status_code, answer.headers[TEMPLATE_HEADER]) == (200, "plain")
    prompt = httpx2.post(f"{stories_url}/v1/apply-template", json={"model": name, "messages": HI}).json()
    assert "User: Hi\nAssistant:" in prompt["prompt"]
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt["tokens"])
    with openai.OpenAI(base_url=f"{stories_url}/v1", api_key="none", max_retries=0) as client:
        assert client.responses.create(model=name, input="Hi", max_output_tokens=5).output_text
    with anthropic.Anthropic(base_url=stories_url, api_key="none", max_retries=0) as claude:
        assert claude.messages.create(model=name, messages=HI, max_tokens=5).content  # type: ignore[arg-type]
    with ollama.Client(stories_url) as client:
        assert client.chat(name, HI, options={"num_predict": 5}).message.content
    told = httpx2.post(f"{stories_url}/v1/completions", json={"model": name, "prompt": "Hi", "max_tokens": 2})
    assert TEMPLATE_HEADER not in told.headers
