"""The model store through Ollama's own client: create, copy, upload, pull and delete."""

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import ollama
import pytest

from localllm import LLM, SamplingParams
from localllm.client.model import open_model
from localllm.client.server import ServerClient
from localllm.errors import ModelNotFound
from localllm.hub.catalog import PACKAGE_FOLDER
from localllm.hub.local_names import find_edition, set_alias
from localllm.plan.fit import FreeMemory
from localllm.request import ChatRequest
from tests.server.conftest import running
from tests.shared import shared

OPTIONS = {"temperature": 0, "num_predict": 24}
GREEDY = SamplingParams(temperature=0, max_tokens=24)
HI: list[Any] = [{"role": "user", "content": "Hi"}]
CAT = {"role": "system", "content": "You are a cat."}
DEMO = PACKAGE_FOLDER / "boxed" / "demo"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def client(demo_url: str) -> Iterator[ollama.Client]:
    with ollama.Client(host=demo_url) as client:
        yield client


def test_an_edition_answers_as_its_maker_wants_on_the_model_that_is_loaded(
    client: ollama.Client, demo_url: str, demo: LLM
) -> None:
    shots = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    statuses = [
        line.status
        for line in client.create(
            "mycat", from_="demo", system="You are a cat.", parameters=OPTIONS, messages=shots, stream=True
        )
    ]
    assert statuses[-1] == "success"
    assert "mycat" in {model["id"] for model in httpx2.get(f"{demo_url}/v1/models").json()["data"]}
    expected = demo.chat([CAT, *shots, *HI], GREEDY).text
    assert client.chat("mycat", HI).message.content == expected
    assert client.chat("mycat:latest", HI).message.content == expected
    assert client.generate("mycat", "Hi").response == expected
    other = [{"role": "system", "content": "You are a dog."}, *HI]
    assert client.chat("mycat", other).message.content == demo.chat([other[0], *shots, *HI], GREEDY).text
    assert len(client.chat("mycat", HI, options={"num_predict": 2}).message.content or "") < len(expected)
    assert [model.model for model in client.ps().models] == ["demo:latest"], "it was loaded again"


def test_openais_clients_can_use_an_edition(client: ollama.Client, demo_url: str, demo: LLM) -> None:
    import openai

    client.create("mycat", from_="demo", system="You are a cat.", parameters=OPTIONS)
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as other:
        done = other.chat.completions.create(model="mycat", messages=HI)
    assert done.choices[0].message.content == demo.chat([CAT, *HI], GREEDY).text


def test_our_own_client_can_use_an_edition(client: ollama.Client, demo_url: str, demo: LLM) -> None:
    client.create("mycat", from_="demo", system="You are a cat.", parameters=OPTIONS)
    with closing(ServerClient(demo_url)) as server:
        model = open_model(server, "mycat", path=None, load=False)
        assert model.default_params == replace(demo.default_params, temperature=0, max_tokens=24)
        request = model.prepare(ChatRequest(HI, model.default_params))
        said = "".join(piece.text for piece in model.submit(request))
    assert said == demo.chat([CAT, *HI], GREEDY).text


def test_an_edition_of_an_edition_merges_both(client: ollama.Client, demo: LLM) -> None:
    client.create("mycat", from_="demo", system="You are a cat.", parameters=OPTIONS)
    client.create("short", from_="mycat", parameters={"num_predict": 4})
    expected = demo.chat([CAT, *HI], SamplingParams(temperature=0, max_tokens=4)).text
    assert client.chat("short", HI).message.content == expected


def test_an_edition_has_a_template_of_its_own(client: ollama.Client, demo: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    client.create("plain", from_="demo", template=template, parameters=OPTIONS)
    ids = demo.tokenizer.encode("Once upon a time", special=False)
    asked: list[Any] = [{"role": "user", "content": "Once upon a time"}]
    assert client.chat("plain", asked).message.content == demo.generate(ids, GREEDY).text
    assert client.show("plain").template == template


def test_a_created_model_is_listed_shown_copied_and_removed(client: ollama.Client) -> None:
    client.create("mycat", from_="demo", system="You are a cat.", parameters={"stop": ["a", "b"]}, license="mine")
    client.copy("mycat", "tom:1")
    client.copy("demo", "other")
    names = {model.model: model for model in client.list().models}
    assert {"mycat:latest", "tom:1", "other:latest", "demo:latest"} <= names.keys()
    assert names["mycat:latest"].digest == names["tom:1"].digest != names["demo:latest"].digest
    assert names["other:latest"].digest == names["demo:latest"].digest
    told = client.show("tom:1")
    assert told.license == "mine" and told.details and told.details.parent_model == "demo"
    assert told.parameters and 'stop                           "a"\n' in told.parameters
    for line in ("FROM demo", 'SYSTEM """You are a cat."""', 'PARAMETER stop "b"', 'LICENSE """mine"""'):
        assert line in (told.modelfile or "")
    for name in ("mycat", "tom:1", "other:latest"):
        client.delete(name)
    assert not {"mycat:latest", "tom:1", "other:latest"} & {model.model for model in client.list().models}
    with pytest.raises(ollama.ResponseError, match="stays"):
        client.delete("demo")


@pytest.mark.parametrize(
    ("name", "asked", "told"),
    [
        ("a/b/../c", {"from_": "demo"}, "is not a valid name"),
        ("demo", {"from_": "demo"}, "choose another name"),
        ("x", {"from_": "/etc/passwd"}, "not a model name"),
        ("x", {"from_": "nothing-like-it"}, "no model is called"),
        ("x", {}, "neither 'from' or 'files' was specified"),
        ("x", {"from_": "demo", "template": "{{ .Prompt }}"}, "in Go's syntax"),
        ("x", {"from_": "demo", "template": "{% for %}"}, "template is broken"),
        ("x", {"from_": "demo", "template": "{{ nothing() }}"}, "cannot render"),
        ("x", {"from_": "demo", "template": "Say it!"}, "omits the user's message"),
        ("x", {"from_": "demo", "template": "{% for i in range(10**9) %}{% endfor %}"}, "chat template"),
        ("x", {"from_": "demo", "parameters": {"mirostat": 2}}, "mirostat"),
        ("x", {"from_": "demo", "quantize": "q4_K_M"}, "int8, int4"),
        ("x", {"from_": "demo", "adapters": {"a": "b"}}, "adapters is not supported"),
        ("x", {"files": {"../../x": "sha256:" + "0" * 64}}, "not a valid file name"),
        ("x", {"files": {"x.gguf": "sha256:" + "0" * 64}}, "was not uploaded"),
    ],
)
def test_an_invalid_create_is_refused(
    client: ollama.Client, home: Path, name: str, asked: dict[str, Any], told: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=told):
        client.create(name, **asked)
    assert not list(home.rglob("*.json"))


def test_an_uploaded_gguf_file_runs_and_is_removed_completely(home: Path) -> None:
    file = shared("stories260K-f32.gguf")
    with running() as url, ollama.Client(host=url) as client:
        digest = client.create_blob(file)
        assert digest == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
        client.create("stories", files={"stories.gguf": digest}, parameters=OPTIONS)
        said = client.generate("stories", "Once upon a time, there was a little girl named").response
        assert said.startswith(" Lily. She loved to play outside in the park.")
        shown = client.show("stories")
        assert shown.details and shown.details.format == "gguf" and shown.modelinfo
        assert shown.modelinfo["llama.block_count"] == 5 and shown.modelinfo["tokenizer.ggml.tokens"] is None
        client.delete("stories")
        assert not [path for path in home.rglob("*") if path.is_file()]
        assert client.list().models


def test_a_folder_of_safetensors_that_was_sent_answers(demo: LLM) -> None:
    names = (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )
    with running() as url, ollama.Client(host=url) as client:
        client.create("sent", files={name: client.create_blob(DEMO / name) for name in names}, parameters=OPTIONS)
        assert client.chat("sent", HI).message.content == demo.chat(HI, GREEDY).text


def test_a_model_is_pulled_with_its_progress(hub: Any, cache: Path, demo: LLM) -> None:
    hub.add("org/tiny", DEMO)
    with running() as url, ollama.Client(host=url) as client:
        lines = list(client.pull("org/tiny", stream=True))
        statuses = [line.status or "" for line in lines]
        assert statuses[0] == "pulling manifest" and statuses[-1] == "success"
        assert statuses[-3:-1] == ["verifying sha256 digest", "writing manifest"]
        weights = [line for line in lines if line.total and line.total > 5_000_000]
        assert weights[-1].completed == weights[-1].total
        assert (
            weights[-1].digest == f"sha256:{hashlib.sha256((DEMO / 'model.safetensors').read_bytes()).hexdigest()}"
        )
        assert client.pull("org/tiny").status == "success"
        assert "org/tiny:latest" in {model.model for model in client.list().models}
        assert client.chat("org/tiny", HI, options=OPTIONS).message.content == demo.chat(HI, GREEDY).text
        client.delete("org/tiny")
        assert "org/tiny:latest" not in {model.model for model in client.list().models}


def test_a_plain_name_is_pulled_in_the_edition_that_fits_and_keeps_its_name(
    hub: Any, cache: Path, demo: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("unsloth/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q4_K_M.gguf": b"GGUF"})
    hub.add("Qwen/Qwen3-0.6B", DEMO)
    monkeypatch.setattr("localllm.server.store.memory_of", lambda *machine: FreeMemory("cpu", 8 * 10**9, 1e13))
    with running() as url, ollama.Client(host=url) as client:
        statuses = {line.status for line in client.pull("qwen3:0.6b", stream=True)}
        assert {status for status in statuses if status and not status.startswith("pulling ")} == {
            *("verifying sha256 digest", "writing manifest", "success")
        }
        assert {"qwen3:0.6b", "qwen3:0.6b-bf16"} <= {model.model for model in client.list().models}
        assert client.chat("qwen3:0.6b", HI, options=OPTIONS).message.content == demo.chat(HI, GREEDY).text
        client.delete("qwen3:0.6b")
        assert not {"qwen3:0.6b", "qwen3:0.6b-bf16"} & {model.model for model in client.list().models}


def test_models_missing_on_the_hub_are_reported(hub: Any, cache: Path) -> None:
    with running() as url, ollama.Client(host=url) as client:
        with pytest.raises(ollama.ResponseError, match="org/none"):
            list(client.pull("org/none", stream=True))
        with pytest.raises(ollama.ResponseError) as error:
            client.pull("org/none")
        assert error.value.status_code == 404
        assert client.pull("demo").status == "success"


@pytest.mark.slow
def test_a_client_that_leaves_ends_the_pull(hub: Any, cache: Path) -> None:
    hub.add("org/tiny", DEMO)
    hub.rate = 400_000
    with running() as url, ollama.Client(host=url) as client:
        stream = client.pull("org/tiny", stream=True)
        for line in stream:
            if line.total and line.total > 5_000_000 and line.completed:
                break
        stream.close()  # type: ignore[attr-defined]
        sent = -1
        while hub.sent("model.safetensors") != sent:  # the server looks now and then whether the client is there
            sent = hub.sent("model.safetensors")
            time.sleep(1)
        assert sent < 5_000_000
        hub.rate = None
        assert client.pull("org/tiny").status == "success"
        assert hub.sent("model.safetensors") < 7_000_000, "it did not go on from what was there"


def test_nothing_is_pushed(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as error:
        client.push("demo")
    assert error.value.status_code == 501


def test_a_created_model_is_saved_in_a_readable_file(client: ollama.Client) -> None:
    client.create("mycat:v1", from_="demo", system="You are a cat.")
    edition = find_edition("mycat:v1")
    assert edition and edition.source in ("demo", str(DEMO)) and edition.system == "You are a cat."


def test_keep_alive_is_respected(demo: LLM) -> None:
    with running() as url, ollama.Client(host=url) as client:
        assert client.generate("demo", keep_alive="10m").done_reason == "load"
        [kept] = client.ps().models
        assert kept.expires_at and 590 < kept.expires_at.timestamp() - time.time() <= 600
        client.chat("demo", HI, keep_alive=-1, options={"num_predict": 1})
        [kept] = client.ps().models
        assert kept.expires_at and kept.expires_at.year > 2200
        assert client.generate("demo", keep_alive=0).done_reason == "unload"
        for _ in range(50):
            if not client.ps().models:
                break
            time.sleep(0.1)
        assert not client.ps().models
        assert client.chat("demo", [], keep_alive=0).done_reason == "unload", "it was not there"
        assert not client.ps().models, "it was loaded to be let go of"


def test_a_context_beyond_the_models_is_as_much_as_it_knows(demo: LLM) -> None:
    with running() as url, ollama.Client(host=url) as client:
        client.create("wide", from_="demo", parameters={"num_ctx": 100_000})
        for name in ("wide", "demo"):
            done = client.chat(name, HI, options={**OPTIONS, "num_ctx": 32_768})
            assert done.message.content == demo.chat(HI, GREEDY).text
        assert [one.context_length for one in client.ps().models] == [demo.config.max_context]


def test_the_context_of_an_edition_is_its_limit(client: ollama.Client, demo_url: str) -> None:
    client.create("narrow", from_="demo", parameters={"num_ctx": 32})
    with pytest.raises(ollama.ResponseError, match="the context holds 32"):
        client.chat("narrow", [{"role": "user", "content": "word " * 60}])


def test_invalid_uploads_leave_nothing(home: Path) -> None:
    with running() as url, ollama.Client(host=url) as client:
        (home.parent / "x.gguf").write_bytes(b"GGUF" + b"x" * 100)
        digest = client.create_blob(home.parent / "x.gguf")
        with pytest.raises(ollama.ResponseError):
            client.create("bad", files={"x.gguf": digest})
        assert not [path for path in home.rglob("*") if path.is_file()]


def test_create_can_quantize(home: Path) -> None:
    with running() as url, ollama.Client(host=url) as client:
        folder = shared("TinyStories-656K-hf")
        names = [path.name for path in folder.iterdir() if path.suffix in (".json", ".safetensors")]
        files = {name: client.create_blob(folder / name) for name in names}
        statuses = [line.status for line in client.create("small", files=files, quantize="int8", stream=True)]
        assert "quantizing to INT8" in statuses and statuses[-1] == "success"
        told = client.show("small").details
        assert told and told.quantization_level in ("INT8", "I8")
        assert client.generate("small", "Once upon a time", options=OPTIONS).response
        assert not list(home.glob("models/*")) and not list(home.glob("blobs/*")), (
            "only what was made of it is used"
        )
        client.delete("small")
        assert not [path for path in home.rglob("*") if path.suffix in (".safetensors", ".gguf")]


def test_an_invalid_name_is_refused_before_any_progress(demo_url: str) -> None:
    answer = httpx2.post(f"{demo_url}/api/create", json={"model": "m" * 300, "from": "demo"})
    assert answer.status_code == 400 and "is not a valid name" in answer.json()["error"]


def test_a_loaded_model_with_removed_files_still_answers(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "passing")
    set_alias("passing", str(folder))
    with running() as url, ollama.Client(url) as client:
        client.generate("demo")
        client.generate("passing")
        shutil.rmtree(folder)
        assert [model.model for model in client.ps().models] == ["demo:latest"]
        assert "passing" not in {model["id"] for model in httpx2.get(f"{url}/v1/models").json()["data"]}
        assert {one["name"] for one in httpx2.get(f"{url}/localllm/ps").json()["models"]} == {"demo", "passing"}
        assert httpx2.post(f"{url}/localllm/stop", json={"model": "passing"}).status_code == 200


def test_a_path_means_the_model_and_no_edition_of_it() -> None:
    with running() as url, ollama.Client(url) as client, closing(ServerClient(url)) as server:
        client.create("kitty", from_="demo", system="You are a cat.")
        client.generate("kitty")
        assert [model.model for model in client.ps().models] == ["kitty:latest"]
        with pytest.raises(ModelNotFound, match="is not loaded"):
            server.request_json("/localllm/open", {"path": str(DEMO)})
        client.generate("demo", keep_alive=0)
        client.generate("demo")
        assert server.request_json("/localllm/open", {"path": str(DEMO)})["name"] == "demo"
