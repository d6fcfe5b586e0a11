"""Third-party clients with a real server: npm packages with Node.js, and Python packages in their own environment.
`make clients` installs both; tests of missing ones are skipped.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from localllm import LLM, SamplingParams

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv-clients" / "bin" / "python"
NODE = shutil.which("node")
STORY = [{"role": "user", "content": "Tell a short story."}]

needs_node = pytest.mark.skipif(
    NODE is None or not (HERE / "node_modules" / "ai").is_dir(), reason="needs node, and `make clients`"
)
needs_packages = pytest.mark.skipif(not PYTHON.exists(), reason="needs `make clients`")


def ask(*command: str | Path) -> Any:
    """Run a client, and parse the last line of its output as JSON."""
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def by_node(case: str, url: str) -> Any:
    return ask(NODE or "node", "clients.mjs", case, url, "demo")


@pytest.fixture(scope="module")
def story(demo: LLM) -> str:
    return demo.chat(STORY, SamplingParams(temperature=0, max_tokens=60)).text


@needs_node
def test_the_npm_package_of_ollama(demo_url: str, story: str) -> None:
    told = by_node("ollama", demo_url)
    assert told["models"] == told["running"] == ["demo:latest"]
    assert told["chat"] == told["streamed"] == told["generated"] == story
    assert told["object"].keys() == {"name", "happy"} and told["vectors"] == [256, 256]
    assert "completion" in told["shown"]


@needs_node
@pytest.mark.quick_every(3)
@pytest.mark.parametrize("provider", ["ollama-ai-provider-v2", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"])
def test_a_provider_of_the_ai_sdk(demo_url: str, story: str, provider: str) -> None:
    told = by_node(provider, demo_url)
    assert told["streamed"].startswith(story) and told["text"] and told["conversation"]
    if provider != "ollama-ai-provider-v2":  # whose limit stands where Ollama has none
        assert (told["streamed"], told["usage"], told["finish"]) == (story, 60, "length")
    assert told["object"].keys() == {"name", "happy"} and type(told["object"]["happy"]) is bool
    called = by_node(f"{provider} tools", demo_url)
    assert (called["calls"], called["results"]) == (["weather"], 1)
    assert [list(given) for given in called["inputs"]] == [["city"]]
    if provider != "@ai-sdk/anthropic":
        assert by_node(f"{provider} embed", demo_url) == {"vector": 256}


@needs_packages
def test_langchain_ollama(demo_url: str, story: str) -> None:
    told = ask(PYTHON, "clients.py", "langchain_ollama", demo_url, "demo")
    assert told["text"] == told["streamed"] == told["generated"] == story
    assert told["object"].keys() == {"name", "says", "happy"} and told["vectors"] == [256, 256]


@pytest.mark.slow
@needs_packages
def test_instructor(demo_url: str) -> None:
    """Instructor validates responses against the requested class."""
    told = ask(PYTHON, "clients.py", "instructor", demo_url, "demo")
    assert told.keys() == {"json_schema", "tools", "responses"}
    assert all(cat["says"] in ("meow", "purr") for cat in told.values())


@pytest.mark.slow
@needs_packages
def test_pydantic_ai(demo_url: str, story: str) -> None:
    told = ask(PYTHON, "clients.py", "pydantic_ai", demo_url, "demo")
    assert told["chat"].startswith(story) and told["responses"].startswith(story)
    objects = [told[f"{api} {kind}"] for api in ("chat", "responses") for kind in ("native", "tool")]
    assert all(cat.keys() == {"name", "says", "happy"} for cat in objects)


@pytest.mark.slow
@needs_packages
def test_litellm(demo_url: str, story: str) -> None:
    told = ask(PYTHON, "clients.py", "litellm", demo_url, "demo")
    for provider in ("openai", "ollama_chat", "anthropic"):
        assert told[provider] == told[f"{provider} streamed"] == story
        assert told[f"{provider} object"].keys() == {"name", "says", "happy"}
    assert told["ollama"] == told["ollama streamed"] and told["vector"] == 256


@pytest.mark.slow
@needs_packages
def test_the_program_llm_with_its_plug_in_for_ollama(demo_url: str, story: str) -> None:
    told = ask(PYTHON, "clients.py", "llm", demo_url, "demo")
    assert told["models"] and told["text"] == told["streamed"] == story
    assert told["object"].keys() == {"says"}
