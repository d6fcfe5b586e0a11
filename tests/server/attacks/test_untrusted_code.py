"""Untrusted input that is executed (chat templates, schemas with patterns), and pickles, which never are."""

import ast
import asyncio
import json
import shutil
import time
from pathlib import Path

import httpx2
import pytest

import localllm
from localllm.hub.catalog import bundled_folder, catalog
from localllm.hub.local_names import set_alias
from tests.server.attacks.wire import COMPLETION, exchange, request
from tests.server.conftest import running, serving
from tests.work import without_collections

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
LOOP = "{% for x in range(99999) %}"
TEMPLATES = {
    "reads a file": "{{ cycler.__init__.__globals__.os.popen('cat /etc/passwd').read() }}",
    "reads a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "includes a file": "{% include '/etc/passwd' %}",
    "imports": "{% import 'os' as os %}{{ os }}",
    "changes what it is given": "{{ messages.append(1) }}",
    "never ends": LOOP * 3 + "{% endfor %}" * 3,
    "writes without end": LOOP + "{{ 'x' * 99999 }}{% endfor %}",
    "takes all memory": "{{ 'x' * 10 ** 10 }}",
    "takes a power": "{{ 9 ** (9 ** 9) }}",
}


def copied(demo, folder: Path, template: str) -> Path:
    """Copy the model with another chat template."""
    shutil.copytree(demo.path, folder)
    for file in folder.glob("*chat_template*"):
        file.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


async def ask_beside_streams(url: str, name: str, sent: bytes) -> tuple[int, bytes]:
    """Return status and body of a request, during which other answers go on."""
    async with httpx2.AsyncClient(timeout=60) as client:
        ended = asyncio.Event()
        times: list[float] = []

        async def stream() -> None:
            while not ended.is_set():
                body = COMPLETION | {"model": name, "max_tokens": 200, "stream": True}
                async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        times.append(time.monotonic())
                        if ended.is_set():
                            break

        streaming = asyncio.create_task(stream())
        while len(times) < 20:
            await asyncio.sleep(0.01)
        with without_collections():
            began = time.monotonic()
            said = await asyncio.to_thread(exchange, url, sent)
            seconds = time.monotonic() - began
        ended.set()
        await streaming
        first, last = began + seconds / 4, began + seconds * 3 / 4  # a thousand pieces a second on an idle machine
        assert seconds < 0.5 or any(first < at < last for at in times), "streams stood still"
        return said.status, said.body


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_does_not_harm_other_requests(demo, tmp_path, name):
    with localllm.load(copied(demo, tmp_path / "evil", TEMPLATES[name])) as evil, serving(evil) as url:
        sent = request("POST", "/v1/chat/completions", body=json.dumps(CHAT | {"model": evil.name}).encode())
        status, body = asyncio.run(ask_beside_streams(url, evil.name, sent))
        assert status in (400, 500) and "template" in json.loads(body)["error"]["message"]
        assert b"root:" not in body and b"<class" not in body and len(body) < 1000
        assert exchange(url, sent).status == status, "the next one is told the same"


# Each makes twenty of one character.
REPLACEMENTS = [{"type": "Replace", "pattern": {"String": c}, "content": c * 20} for c in "▁a"] * 4


@pytest.mark.parametrize("section", ["normalizer", "decoder"])
def test_a_tokenizer_that_would_take_all_memory_leaves_the_server_to_others(tmp_path, monkeypatch, section):
    """The library that reads it ends the process if memory runs out."""
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    shutil.copytree(bundled_folder(catalog()["demo"]), tmp_path / "evil")
    file = tmp_path / "evil" / "tokenizer.json"
    kind = {"normalizer": "normalizers", "decoder": "decoders"}[section]
    file.write_text(json.dumps(json.loads(file.read_text()) | {section: {"type": "Sequence", kind: REPLACEMENTS}}))
    set_alias("evil", str(tmp_path / "evil"))
    with running() as url:
        for name, status in (("demo", 200), ("evil", 400), ("demo", 200)):
            body = json.dumps(CHAT | {"model": name}).encode()
            said = exchange(url, request("POST", "/v1/chat/completions", body=body))
            assert said.status == status
            assert name == "demo" or "is not safe to run" in said.message


@pytest.mark.parametrize(
    "arguments",
    [
        {"chat_template": "{{ ''.__class__ }}"},
        {"messages": []},
        {"__class__": 1},
        {"self": 1},
        {"x" * 100_000: 1},
    ],
)
def test_a_client_brings_no_template_of_its_own(demo_url, arguments):
    body = json.dumps(CHAT | {"chat_template_kwargs": arguments}).encode()
    said = exchange(demo_url, request("POST", "/v1/chat/completions", body=body))
    assert said.status == 200 and b"<class" not in said.body
    assert "chat_template_kwargs." in said.headers["x-localllm-ignored"] and len(str(said.headers)) < 1000


PATTERNS = ("(a+)+$", "(a|a)*b", "(.*)*(.*)*(.*)*x", "((a{1,999}){1,999}){1,999}", "a{1000000000}", "(?=a)b")


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("pattern", [*PATTERNS, r"(a)\1", "("])
def test_regular_expressions_that_explode(demo_url, pattern):
    schema = {"type": "string", "pattern": pattern}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = json.dumps(CHAT | {"response_format": form, "max_tokens": 60}).encode()
    sent = request("POST", "/v1/chat/completions", body=body)
    status, body = asyncio.run(ask_beside_streams(demo_url, "demo", sent))
    assert status in (200, 400, 500)
    if status == 400:
        assert "pattern" in json.loads(body)["error"]["message"] or "regex" in str(body)


def parsed():
    for file in sorted(Path(localllm.__file__).parent.rglob("*.py")):
        yield file, ast.parse(file.read_text())


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "multiprocessing"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_METHODS = {("torch", "load"), ("yaml", "load"), ("numpy", "load"), ("np", "load"), ("os", "system")}


def faults(tree: ast.AST) -> list[str]:
    """Names of functions and modules in a program that execute untrusted input."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.split(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN_MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
                found += [f"{owner}.{name}"] if (owner, name) in FORBIDDEN_METHODS else []
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                found.append("shell=True")
            case ast.keyword(arg="allow_pickle" | "trust_remote_code", value=ast.Constant(value=True)):
                found.append(str(node.arg))
    return found


@pytest.mark.slow
def test_no_pickle_or_code_is_executed():
    """No pickle, no eval and no shell; child processes exchange JSON over pipes."""
    files = list(parsed())
    assert len(files) > 200
    assert not [(file.name, fault) for file, tree in files for fault in faults(tree)]


@pytest.mark.parametrize(
    "program",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.pool",
        "eval('1')",
        "torch.load(file)",
        "np.load(file, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_search_for_unsafe_calls_works(program):
    assert faults(ast.parse(program))
