"""Model names that are paths, addresses or worse, and their effect on logs."""

import json
from urllib.parse import quote

import pytest

from tests.server.attacks.wire import COMPLETION, exchange, request

NAMES = [
    ".",
    "..",
    "/",
    "/etc/passwd",
    "//etc/passwd",
    "../../../../etc/passwd",
    "demo/../../../etc/passwd",
    "..\\..\\windows\\win.ini",
    "C:\\Windows\\win.ini",
    "~",
    "~root/.ssh/id_rsa",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "%252e%252e%252f",
    "file:///etc/passwd",
    "http://169.254.169.254/latest/meta-data",
    "https://huggingface.co/../../etc/passwd",
    "hf.co/../../../etc/passwd",
    "hf.co/org/repo/resolve/main/../../../../etc/passwd",
    "org/repo@../../main",
    "org/repo:../../x.gguf",
    "org/repo:/etc/passwd",
    "org/--evil",
    "demo\0.gguf",
    "demo ",
    " demo",
    "DEMO/",
    "models--org--repo",
    "localllm",  # a folder of this checkout, from where the server was started
    "tests/server",
    "README.md",
    "./demo",
    "localllm/boxed/demo",
    "\u202eomed",
    "\uff44\uff45\uff4d\uff4f",
    "$(id)",
    "`id`",
    "{{7*7}}",
    "'; DROP TABLE models; --",
    "<script>alert(1)</script>",
    "\x1b[2J\x1b]0;evil\x07",
    "2026-11-22 00:00:00 INFO everything is fine",
    "x" * 5000,
    "a/" * 5000,
    "gpt-5",
    "Qwen/Qwen3-0.6B",  # not on this machine: nothing is pulled unasked
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:40]))
def test_no_name_leaves_the_store(demo_url, name):
    for sent in (
        request(body=json.dumps(COMPLETION | {"model": name}).encode()),
        request("GET", f"/v1/models/{quote(name, safe='')}", body=b""),
        request("GET", f"/v1/models/{quote(name)}", body=b""),
    ):
        said = exchange(demo_url, sent)
        assert said.status in (400, 403, 404), said
        assert b"root:" not in said.body and b"Traceback" not in said.body
        assert b"/work" not in said.body and b"site-packages" not in said.body


def test_answers_do_not_reveal_existing_files(demo_url):
    here, not_here = (
        exchange(demo_url, request(body=json.dumps(COMPLETION | {"model": name}).encode())).message.replace(
            name, "NAME"
        )
        for name in ("tests/server", "tests/nobody")
    )
    assert here == not_here


@pytest.mark.parametrize("kind", [True, 7, [], {"name": "demo"}])
def test_a_name_is_a_text(demo_url, kind):
    assert exchange(demo_url, request(body=json.dumps(COMPLETION | {"model": kind}).encode())).status == 400
