"""The files of the page: contents, headers, and no links to other hosts."""

import hashlib
import logging
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import httpx2
import pytest

import localllm

ROOT = Path(localllm.__file__).parent.parent
FOLDER = ROOT / "localllm/server/web"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
NAMES = {  # addresses that are no requests: a name of a vocabulary, and where `marked` comes from
    "http://www.w3.org/2000/svg",
    "https://github.com/markedjs/marked",
}
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.mark.parametrize("name", FILES)
def test_every_file_has_its_type_and_a_same_origin_policy(demo_url, name):
    answer = httpx2.get(f"{demo_url}/ui/{name}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"].split(";")[0] == KINDS.get(name.rpartition(".")[2], "text/plain")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'" and policy.pop("require-trusted-types-for") == "'script'"
    assert set(policy.values()) <= {"'self'", "'none'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/ui", "/ui/"])
def test_the_page_lies_at_ui(demo_url, path):
    assert httpx2.get(demo_url + path).content == (FOLDER / "index.html").read_bytes()


def test_cached_files_are_not_sent_again(demo_url):
    tag = httpx2.get(f"{demo_url}/ui/main.js").headers["etag"]
    again = httpx2.get(f"{demo_url}/ui/main.js", headers={"If-None-Match": f'"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert httpx2.get(f"{demo_url}/ui/main.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["web.py", "../web.py", "%2e%2e/web.py", "..%2fweb.py", "/etc/passwd", "marked", "marked/", "main.js/", "%00"],
)
def test_other_paths_are_not_served(demo_url, path):
    assert httpx2.get(f"{demo_url}/ui/{path}").status_code == 404


def test_parts_of_the_page_and_its_gauges_do_not_fill_the_log(demo_url, caplog):
    asked = ("/ui", "/ui/main.js", "/metrics", "/ui/none.js")

    def told():
        paths = [record.fields["path"] for record in caplog.records if record.name == "localllm.requests"]
        return [path for path in paths if path in asked]  # the test before may be logged only now

    with caplog.at_level(logging.INFO, "localllm.requests"):
        for path in asked:
            httpx2.get(demo_url + path)
        end = time.monotonic() + 60
        while "/ui/none.js" not in told() and time.monotonic() < end:
            time.sleep(0.01)  # the line comes behind the answer
    assert told() == ["/ui", "/ui/none.js"]


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_an_address_elsewhere(name):
    text = (FOLDER / name).read_text()
    if name == "marked/LICENSE":
        return  # it is the law's text
    found = set(re.findall(r"""(?:[a-z]+:)?//[\w-]+\.[^\s"'`)>]*""", text.replace("\\/", "/")))
    assert {address for address in found if not any(address.startswith(known) for known in NAMES)} == set()


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".js", ".html"))])
def test_no_text_becomes_html_or_a_program(name):
    text = (FOLDER / name).read_text()
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|\son[a-z]+="
    assert re.findall(banned, text) == []
    assert "<style" not in text and not re.search(r"<script(?! [^>]*src=)", text) and " style=" not in text


def test_marked_is_the_file_that_was_published():
    """Digest of marked 18.2.1 on npm."""
    digest = hashlib.sha256((FOLDER / "marked/marked.esm.js").read_bytes()).hexdigest()
    assert digest == "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de"


@pytest.mark.slow
def test_the_wheel_holds_every_file(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, ROOT]
    found = subprocess.run(build, capture_output=True, text=True)
    if "hatchling" in found.stderr and found.returncode:
        pytest.skip("hatchling, which builds wheels, is not installed")
    assert found.returncode == 0, found.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        held = set(wheel.namelist())
    assert {f"localllm/server/web/{name}" for name in FILES} <= held
    manual = f"localllm-{localllm.__version__}.data/data/share/man/man1"
    assert {f"{manual}/{page.name}" for page in (ROOT / "man").glob("*.1")} <= held
