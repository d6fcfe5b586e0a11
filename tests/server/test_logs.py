"""Log lines, and what must never be in one."""

import asyncio
import json
import logging
import re
import shlex
import socket
import sys
from urllib.parse import urlsplit

import httpx2
import pytest

from localllm.server.logs import LogFormat, LogFormatter, RequestLogger
from localllm.server.models import ModelPool
from localllm.server.prometheus import ServerMetrics
from tests.server.conftest import refuse_to_load, serving

SECRET = "the prompt that nobody must read"

ODD = [{"role": "assistant", "content": SECRET}, {"role": "tool", "content": SECRET, "tool_call_id": "x"}]


@pytest.fixture
def lines(caplog):
    """Return the lines of the log in the requested format."""
    caplog.set_level(logging.INFO, "localllm")

    def shown(form=LogFormat.TEXT):
        return [
            LogFormatter(form).format(record) for record in caplog.records if record.name == "localllm.requests"
        ]

    return shown


def test_a_request_has_a_line_with_its_id_and_numbers_and_without_its_prompt(demo, lines):
    with serving(demo) as url:
        asked = {"model": "demo", "prompt": SECRET, "max_tokens": 5, "ignore_eos": True}
        answer = httpx2.post(f"{url}/v1/completions", json=asked)
        httpx2.post(f"{url}/v1/completions", json=asked)
    line = dict(word.split("=", 1) for word in shlex.split(lines()[0]))
    assert line["id"] == answer.headers["x-request-id"] and len(line["id"]) == 16
    usage = answer.json()["usage"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", "200")
    assert (line["model"], line["output_tokens"], line["finish"]) == ("demo", "5", "length")
    assert int(line["prompt_tokens"]) == usage["prompt_tokens"]
    assert 0 < float(line["ttft"]) <= float(line["seconds"])
    again = json.loads(lines(LogFormat.JSON)[1])
    assert again["id"] != line["id"] and again["output_tokens"] == 5 and again["tokens_per_s"] > 0
    assert SECRET not in "".join(lines()) + "".join(lines(LogFormat.JSON))


def test_prompts_are_logged_only_on_request(demo, lines):
    with serving(demo, with_prompts=True) as url:
        httpx2.post(f"{url}/v1/completions", json={"model": "demo", "prompt": SECRET, "max_tokens": 1})
    assert SECRET in lines()[0]


def test_errors_that_quote_the_prompt_are_not_logged(demo, lines):
    with serving(demo) as url:
        answer = httpx2.post(f"{url}/v1/chat/completions", json={"model": "demo", "messages": ODD})
    assert answer.status_code == 400 and "the chat template refuses" in answer.json()["error"]["message"]
    assert "status=400" in lines()[0] and "error=" not in lines()[0]


def test_requests_that_are_refused_or_not_routed_have_their_lines(demo, lines):
    with serving(demo, strict=True) as url:
        httpx2.get(f"{url}/nowhere")
        httpx2.get(f"{url}/health", headers={"Host": "example.org"})
        httpx2.post(f"{url}/v1/completions", json={"model": "gpt-5", "prompt": "x"})
        httpx2.post(f"{url}/v1/completions", json={"model": "demo", "prompt": SECRET, 'x" status=200\n': 1})
    found = [json.loads(line) for line in lines(LogFormat.JSON)]
    assert [line["status"] for line in found] == [404, 403, 404, 400]
    assert found[0]["error"] == "there is no route GET /nowhere; GET /openapi.json lists all routes"
    assert found[2]["error"].startswith("no model is called gpt-5")
    assert r'error="x\" status=200  is not a field' in lines()[3] and lines()[3].isprintable()
    assert SECRET not in "".join(lines())


@pytest.mark.quick_every(5)
@pytest.mark.parametrize(
    "path", ["/a%0Atime=2020%20event=request", "/%1B[2J%7F", "/%22%20status=200", "/%C2%85%E2%80%A8x"]
)
@pytest.mark.parametrize("form", [LogFormat.TEXT, LogFormat.JSON])
def test_no_path_breaks_out_of_its_line_or_its_value(demo, lines, path, form):
    with serving(demo) as url:
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port)) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            while raw.recv(4096):
                pass
    [line] = lines(form)
    assert line.isascii() and line.isprintable()
    if form is LogFormat.JSON:
        assert json.loads(line)["status"] == 404
    else:
        assert re.findall(r"(?<!\S)status=(\d+)(?!\S)", re.sub(r'"(\\.|[^"\\])*"', '""', line)) == ["404"]


def test_a_fault_has_its_trace_and_no_control_characters():
    try:
        raise ValueError("\x1b]0;title\x07\nlevel=info forged")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "it\nbroke", (), sys.exc_info())
    text, whole = (
        LogFormatter(LogFormat.TEXT).format(record),
        json.loads(LogFormatter(LogFormat.JSON).format(record)),
    )
    first, *rest = text.split("\n")
    assert 'message="it\\nbroke"' in first and "test_logs.py" in text
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert any("ValueError" in line for line in whole["trace"])


def test_an_answer_that_we_break_off_is_our_fault_in_the_log(lines):
    async def broken(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"once", "more_body": True})
        raise ZeroDivisionError

    async def asked():
        scope = {"type": "http", "method": "GET", "path": "/", "client": None}
        await RequestLogger(broken, ServerMetrics(ModelPool(refuse_to_load)))(scope, never, ignored)

    async def never():
        await asyncio.sleep(3600)

    async def ignored(message):
        pass

    with pytest.raises(ZeroDivisionError):
        asyncio.run(asked())
    assert "status=500" in lines()[0]
