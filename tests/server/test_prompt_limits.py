"""An overlong text is refused by its length in every API, while other streams continue."""

import httpx
import pytest

import localllm
from localllm import LLM
from localllm.errors import ContextOverflow
from localllm.request import ChatRequest, SamplingParams

TEXT = "the quick brown fox jumps over the lazy dog " * 20_000  # 880 KB, which takes seconds to tokenize
AT_LEAST = r"the prompt has at least \d{5} tokens and the context holds \d+; "
CHAT = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["text", "chat"])
def test_a_model_refuses_it_without_tokenizing_it(demo: LLM, prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenized = list[int]()
    for name in ("encode", "encode_chat"):
        encode = getattr(demo.tokenizer, name)
        monkeypatch.setattr(demo.tokenizer, name, lambda text, encode=encode: tokenized.append(0) or encode(text))
    with pytest.raises(ContextOverflow, match=AT_LEAST + "this model supports") as caught:
        demo.prepare(ChatRequest(prompt))
    assert not tokenized
    assert demo.context < caught.value.prompt_tokens <= len(demo.encode(ChatRequest(prompt)))
    assert tokenized


def test_a_prompt_that_would_fit_with_more_context_says_so() -> None:
    with localllm.load("demo", context=64) as llm:
        with pytest.raises(ContextOverflow, match=r"at least \d+ tokens.*give --context more or a shorter prompt"):
            llm.prepare(ChatRequest("abcdefgh " * 300))
        with pytest.raises(ContextOverflow, match=r"has \d+ tokens and the context holds 64; give --context \d+"):
            llm.prepare(ChatRequest("abcdefgh " * 10 + "!" * 100))


def test_vectors_of_it_are_refused_unless_it_may_be_cut(demo: LLM) -> None:
    with pytest.raises(ContextOverflow, match=AT_LEAST + r"the model supports \d+; shorten the text"):
        demo.embed(TEXT)
    assert demo.embed(TEXT[: demo.context * 14], truncate=True).left_out[0] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/embeddings", {"input": TEXT}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
        ("/api/chat", {"messages": CHAT}),
        ("/api/generate", {"prompt": TEXT}),
    ],
)
def test_every_api_refuses_it(demo_url: str, path: str, body: dict[str, object]) -> None:
    answer = httpx.post(demo_url + path, json={"model": "demo"} | body, timeout=30)
    assert answer.status_code == 400
    assert "tokens and the context holds" in answer.text
    assert "at least" in answer.text


def test_a_concurrent_stream_continues(demo: LLM, demo_url: str) -> None:
    stream = demo.stream("Once", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    httpx.post(demo_url + "/v1/chat/completions", json={"model": "demo", "messages": CHAT}, timeout=30)
    assert len(list(stream)) == 199
