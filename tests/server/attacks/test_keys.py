"""Missing and wrong API keys."""

import hmac
import json
from pathlib import Path

import openai
import pytest

from localllm.errors import UsageError
from localllm.server import access
from localllm.server.access import access_warnings, make_access_policy, read_keys
from tests.server.attacks.wire import KEY, exchange, public_policy, request
from tests.server.conftest import serving

SECOND = "another-key-of-this-server"


@pytest.fixture(scope="module")
def url(demo):
    with serving(demo, public_policy(keys=(KEY, SECOND))) as url:
        yield url


@pytest.mark.parametrize(
    "line",
    [
        f"Authorization: Bearer {KEY}",
        f"authorization: bearer {SECOND}",
        f"X-Api-Key: {KEY}",
        f"x-api-key: none\r\nAuthorization: Bearer {KEY}",
    ],
)
def test_one_key_of_the_list_is_enough(url, line):
    assert exchange(url, request("POST", "/v1/completions", line)).status == 200


@pytest.mark.parametrize(
    "line",
    [
        "X: y",
        "Authorization: Bearer",
        "Authorization: Bearer none",
        f"Authorization: {KEY}",
        f"Authorization: Basic {KEY}",
        f"Authorization: Bearer {KEY[:-1]}",
        f"Authorization: Bearer {KEY}x",
        f"Authorization: Bearer {KEY.upper()}",
        f"Authorization: Bearer {KEY},{SECOND}",
        f"x-api-key: \xff{KEY}",
        f"Cookie: key={KEY}",
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("POST", "/api/chat"),
        ("GET", "/metrics"),
        ("POST", "/health"),
        ("POST", "/ui"),
        ("GET", "//health"),
        ("GET", "/health/../v1/models"),
        ("GET", "/uix"),
        ("OPTIONS", "/v1/models"),
    ],
)
def test_without_a_key_nothing_is_revealed(url, line, method, path):
    said = exchange(url, request(method, path, line, body=b""))
    assert (said.status, said.headers["www-authenticate"]) == (401, "Bearer")
    assert "Authorization: Bearer KEY" in said.message and KEY not in said.message


@pytest.mark.parametrize("path", ["/health", "/", "/ui", "/ui/app.js"])
def test_public_routes_need_no_key(url, path):
    assert exchange(url, request("GET", path, body=b"")).status != 401


def test_without_a_key_health_reveals_only_the_status(url):
    assert json.loads(exchange(url, request("GET", "/health", body=b"")).body) == {"status": "ok"}
    known = exchange(url, request("GET", "/health", f"x-api-key: {KEY}", body=b""))
    assert json.loads(known.body)["models"] == ["demo"]


def test_a_key_in_the_address_is_none(url):
    assert exchange(url, request("GET", f"/v1/models?api_key={KEY}&key={KEY}", body=b"")).status == 401


def test_each_api_reports_it_in_its_own_form(url):
    import anthropic  # which takes a second

    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        assert client.models.list().data
        client.api_key = "none"
        with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
            client.models.list()
    asked = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    with client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(**asked)
    assert "the API key is wrong" in exchange(url, request("POST", "/api/chat", "x-api-key: none")).message


def test_a_long_body_of_a_stranger_is_not_read(url):
    head = request("POST", "/v1/completions", "Content-Length: 10000000", body=b"")
    said = exchange(url, head)  # and nothing of the body
    assert (said.status, said.headers["connection"]) == (401, "close")


def test_keys_are_compared_as_full_digests(monkeypatch):
    """The sent key is compared with every configured one by `compare_digest`, even after a match, and never as
    text.
    """
    compared, compare = [], hmac.compare_digest

    def noted(one, other):
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(access.hmac, "compare_digest", noted)
    checked = public_policy(keys=(KEY, SECOND))
    checked.check_key([(b"authorization", f"Bearer {KEY}".encode()), (b"x-api-key", b"none")])
    assert len(compared) == 4
    assert all(len(part) == 32 for pair in compared for part in pair)


@pytest.mark.parametrize("key", ["", "x", "fifteen-letters", "with blanks in it, many", "ä" * 20, "\n" * 20])
def test_weak_keys_are_refused(key):
    with pytest.raises(UsageError, match="use at least 16 letters and digits"):
        make_access_policy("127.0.0.1", [key])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "fe80::1", "[2001:db8::1]", "::ffff:10.0.0.1"])
def test_a_reachable_address_needs_a_key_or_an_explicit_flag(host):
    with pytest.raises(UsageError, match="no API key is required; add --api-key-file FILE, or --insecure"):
        make_access_policy(host)
    assert make_access_policy(host, insecure=True).is_exposed
    assert make_access_policy(host, [KEY]).is_exposed
    assert "without a key" in access_warnings(make_access_policy(host, insecure=True))[0]
    assert "--tls-cert" in access_warnings(make_access_policy(host, [KEY]))[0]


def test_loopback_takes_none_and_no_warning():
    assert not make_access_policy("localhost").keys and not make_access_policy("[::1]").is_exposed
    assert not access_warnings(make_access_policy("127.0.0.1"))


def test_any_origin_takes_a_key():
    with pytest.raises(UsageError, match="accepts any web page"):
        make_access_policy("127.0.0.1", origins=["*"])


@pytest.mark.parametrize("origin", ["null", "https://a.example/", "a.example", "https://*.a.example", ""])
def test_an_invalid_origin_is_rejected(origin):
    with pytest.raises(UsageError, match="is not an origin"):
        make_access_policy("127.0.0.1", origins=[origin])


@pytest.mark.parametrize("name", ["http://box", "box:80", "*", "-", "", "a b"])
def test_an_invalid_host_name_is_rejected(name):
    with pytest.raises(UsageError, match="is not a host name"):
        make_access_policy("127.0.0.1", host_names=[name])


def test_keys_of_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n  {SECOND}\r\n")
    assert read_keys(str(file)) == [KEY, SECOND]
    assert read_keys(None) == []


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe"])
def test_a_file_without_keys_is_reported(tmp_path: Path, content: bytes | None):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=str(file)):
        read_keys(str(file))


def test_keys_are_never_in_reprs():
    assert KEY not in repr(make_access_policy("127.0.0.1", [KEY]))
