"""Query a server of localllm through popular Python packages. Each case prints its result as one line of JSON. It
runs in a separate environment (requirements.txt), since these packages need other versions than the tests.

    python clients.py CASE URL MODEL
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import pydantic

CASE, URL, MODEL = sys.argv[1:]
PROMPT = "Tell a short story."


class Cat(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    says: Literal["meow", "purr"]
    happy: bool


def langchain_ollama() -> dict[str, Any]:
    from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

    chat = ChatOllama(model=MODEL, base_url=URL, temperature=0, num_predict=60)
    told: dict[str, Any] = {"text": chat.invoke(PROMPT).text}
    told["streamed"] = "".join(str(piece.content) for piece in chat.stream(PROMPT))
    told["object"] = chat.with_structured_output(Cat, method="json_schema").invoke("A cat as JSON.").model_dump()
    plain = OllamaLLM(model=MODEL, base_url=URL, temperature=0, num_predict=60)
    told["generated"] = plain.invoke(PROMPT)
    told["vectors"] = [len(v) for v in OllamaEmbeddings(model=MODEL, base_url=URL).embed_documents(["a", "b"])]
    return told


def instructor() -> dict[str, Any]:
    import instructor
    import openai

    told = {}
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    modes = {
        "json_schema": instructor.Mode.JSON_SCHEMA,
        "tools": instructor.Mode.TOOLS,
        "responses": instructor.Mode.RESPONSES_TOOLS,
    }
    for name, mode in modes.items():
        asked = instructor.from_openai(client, mode=mode)
        limit = {"max_output_tokens": 120} if name == "responses" else {"max_tokens": 120, "temperature": 0}
        messages: Any = [{"role": "user", "content": "A cat."}]
        made = asked.chat.completions.create(
            model=MODEL, messages=messages, response_model=Cat, max_retries=0, **limit
        )
        told[name] = made.model_dump()
    return told


def pydantic_ai() -> dict[str, Any]:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    profile = OpenAIModelProfile(supports_json_schema_output=True)
    settings: Any = {"max_tokens": 120, "temperature": 0}
    told = {}
    for name, kind in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
        model = kind(MODEL, provider=provider, profile=profile)
        told[name] = Agent(model, model_settings=settings).run_sync(PROMPT).output
        native = Agent(model, output_type=NativeOutput(Cat), model_settings=settings)
        told[f"{name} native"] = native.run_sync("A cat.").output.model_dump()
        by_tool = Agent(model, output_type=ToolOutput(Cat), model_settings=settings)
        told[f"{name} tool"] = by_tool.run_sync("A cat.").output.model_dump()
    return told


def litellm() -> dict[str, Any]:
    import litellm

    messages = [{"role": "user", "content": PROMPT}]
    told = {}
    for prefix, base in (("openai", f"{URL}/v1"), ("ollama_chat", URL), ("ollama", URL), ("anthropic", URL)):
        name = f"{prefix}/{MODEL}"
        asked = {"model": name, "api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 60}
        told[prefix] = litellm.completion(messages=messages, **asked).choices[0].message.content
        pieces = litellm.completion(messages=messages, stream=True, **asked)
        told[f"{prefix} streamed"] = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        if prefix != "ollama":
            schema = litellm.completion(messages=messages, response_format=Cat, **{**asked, "max_tokens": 120})
            told[f"{prefix} object"] = json.loads(schema.choices[0].message.content)
    vector = litellm.embedding(model=f"openai/{MODEL}", input=["a"], api_base=f"{URL}/v1", api_key="none")
    told["vector"] = len(vector.data[0]["embedding"])
    return told


def llm() -> dict[str, Any]:
    """Run the program `llm` with its plug-in for Ollama, in its own home folder."""
    program = Path(sys.executable).parent / "llm"
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "OLLAMA_HOST": URL, "LLM_USER_PATH": home}

        def run(*words: str) -> str:
            return subprocess.run(
                [program, *words],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            ).stdout.strip()

        asked = ("-m", f"ollama/{MODEL}:latest", "-o", "temperature", "0", "-o", "num_predict", "60")
        return {
            "models": MODEL in run("models"),
            "streamed": run(*asked, PROMPT),
            "text": run(*asked, "--no-stream", PROMPT),
            "object": json.loads(run(*asked, "--schema", "says bool", "A cat.")),
        }


print(json.dumps(globals()[CASE]()))
