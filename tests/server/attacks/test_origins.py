"""DNS rebinding, foreign origins, preflights: requests that web pages make browsers send."""

import pytest

from tests.server.attacks.wire import BODY, KEY, exchange, public_policy, request
from tests.server.conftest import serving

PAGE = "https://chat.example.org"
AUTHORIZED = f"Authorization: Bearer {KEY}"


@pytest.fixture(scope="module")
def url(demo):
    with serving(demo, public_policy(host_names=["Box.example.org"], origins=[PAGE])) as url:
        yield url


@pytest.fixture(scope="module")
def open_url(demo):
    with serving(demo, public_policy(origins=["*"])) as url:
        yield url


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("box.example.org", 200),
        ("BOX.example.org:443", 200),
        ("192.168.0.7:11434", 200),  # a rebound name is a name
        ("[fe80::1]", 200),
        ("0.0.0.0", 403),
        ("evil.example", 403),
        ("box.example.org.evil.example", 403),
        ("sub.box.example.org", 403),
        ("localhost.", 403),
    ],
)
def test_rebinding_on_a_reachable_address(url, host, status):
    assert exchange(url, request("POST", "/v1/completions", AUTHORIZED, host=host)).status == status


@pytest.mark.parametrize("host", ["evil.example", "192.168.0.7"])
@pytest.mark.parametrize("path", ["/", "/ui", "/health", "/v1/models", "/api/chat", "/nowhere"])
def test_rebinding_on_loopback(demo_url, host, path):
    assert exchange(demo_url, request("GET", path, host=host, body=b"")).status == 403


def test_several_hosts_are_none(demo_url):
    assert exchange(demo_url, request("GET", "/health", "Host: localhost", body=b"")).status == 400


@pytest.mark.parametrize(
    "origin", ["null", "https://evil.example", f"{PAGE}.evil.example", "http://chat.example.org"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_foreign_origin_is_refused_with_the_key_of_its_visitor(url, origin, method):
    said = exchange(url, request(method, "/v1/models", AUTHORIZED, f"Origin: {origin}"))
    assert said.status == 403
    assert not [name for name in said.headers if name.startswith("access-control-allow")]
    assert said.headers["vary"] == "Origin"


def test_an_origin_of_the_list_may_ask_and_read(url):
    said = exchange(
        url, request("POST", "/v1/completions", AUTHORIZED, f"Origin: {PAGE}", "Sec-Fetch-Site: cross-site")
    )
    assert (said.status, said.headers["access-control-allow-origin"]) == (200, PAGE)
    assert said.headers["vary"] == "Origin"


def test_an_origin_of_the_list_still_needs_a_key_and_can_read_that_it_does(url):
    said = exchange(url, request("POST", "/v1/completions", f"Origin: {PAGE}"))
    assert (said.status, said.headers["access-control-allow-origin"]) == (401, PAGE)


def test_a_second_origin_beside_that_of_the_list_is_refused(url):
    lines = (AUTHORIZED, f"Origin: {PAGE}", "Origin: https://evil.example")
    assert exchange(url, request("POST", "/v1/completions", *lines)).status == 403


def asked_before(origin: str, *lines: str) -> bytes:
    method = "Access-Control-Request-Method: POST"
    return request("OPTIONS", "/v1/completions", f"Origin: {origin}", method, *lines, body=b"")


def test_a_preflight_of_the_list_is_answered_without_a_key(url):
    said = exchange(url, asked_before(PAGE, "Access-Control-Request-Headers: authorization,content-type"))
    assert (said.status, said.body) == (204, b"")
    assert said.headers["access-control-allow-origin"] == PAGE
    assert "POST" in said.headers["access-control-allow-methods"]
    assert said.headers["access-control-allow-headers"] == "authorization,content-type"
    assert said.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in said.headers


@pytest.mark.parametrize("names", ["x" * 2000, "a b", "a\tb"])
def test_headers_that_are_no_names_are_not_repeated_to_a_preflight(url, names):
    said = exchange(url, asked_before(PAGE, f"Access-Control-Request-Headers: {names}"))
    assert said.status == 204 and "access-control-allow-headers" not in said.headers


@pytest.mark.parametrize("origin", ["null", "https://evil.example"])
def test_a_preflight_of_another_origin_is_refused(url, origin):
    said = exchange(url, asked_before(origin))
    assert said.status == 403
    assert not [name for name in said.headers if name.startswith("access-control")]


def test_any_origin_means_any_but_null(open_url):
    evil = "https://evil.example"
    said = exchange(open_url, request("POST", "/v1/completions", AUTHORIZED, f"Origin: {evil}"))
    assert (said.status, said.headers["access-control-allow-origin"]) == (200, evil)
    assert exchange(open_url, request("POST", "/v1/completions", AUTHORIZED, "Origin: null")).status == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize(("method", "body"), [("GET", b""), ("POST", BODY)])
def test_foreign_pages_without_an_origin_are_refused(demo_url, site, method, body):
    """An image with the address `/v1/models/NAME` would otherwise load a model."""
    lines = (f"Sec-Fetch-Site: {site}", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image")
    assert exchange(demo_url, request(method, "/v1/models/demo", *lines, body=body)).status == 403


@pytest.mark.parametrize(
    ("path", "goal", "refused"),
    [
        ("/", "document", False),
        ("/ui", "document", False),
        ("/ui", "iframe", True),
        ("/v1/models", "document", True),
    ],
)
def test_links_of_other_pages_lead_to_pages_alone(demo_url, path, goal, refused):
    lines = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", f"Sec-Fetch-Dest: {goal}")
    assert (exchange(demo_url, request("GET", path, *lines, body=b"")).status == 403) is refused


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_our_own_page_is_answered(demo_url, site):
    assert exchange(demo_url, request("GET", "/v1/models", f"Sec-Fetch-Site: {site}", body=b"")).status == 200
