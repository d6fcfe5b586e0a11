"""TLS from certificate files, and invalid files."""

import re
import ssl
import subprocess
from pathlib import Path

import httpx2
import openai
import pytest

from localllm.errors import UsageError
from localllm.server.access import load_tls_context
from localllm.server.guard import ConnectionLimits
from tests.server.attacks.wire import (
    COMPLETION,
    KEY,
    LONG,
    READER_S,
    completion_request,
    connect,
    connect_narrow,
    public_policy,
    read_to_end,
    wait_until_idle,
)
from tests.server.conftest import serving


def made(folder, name, *options):
    """Create a certificate with its key."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *(options or ["-nodes"]), *subject, "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return str(certificate), str(key)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return made(tmp_path_factory.mktemp("tls"), "own")


@pytest.fixture(scope="module")
def url(demo, files):
    with serving(demo, public_policy(tls=load_tls_context(*files)), ConnectionLimits(head_timeout_s=1)) as url:
        yield url


def test_clients_that_trust_it_are_answered(url, files):
    assert re.fullmatch(r"https://127\.0\.0\.1:\d+", url)
    trust = httpx2.Client(verify=ssl.create_default_context(cafile=files[0]))
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, http_client=trust) as client:
        assert client.models.list().data[0].id == "demo"
        asked = {"model": "demo", "prompt": "Once", "max_tokens": 8, "stream": True}
        assert [chunk.choices[0].text for chunk in client.completions.create(**asked)]


def test_local_pages_may_ask_and_others_may_not(url, files):
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx2.Client(verify=ssl.create_default_context(cafile=files[0]), headers=headers) as client:
        assert client.post(f"{url}/v1/completions", json=COMPLETION, headers={"Origin": url}).status_code == 200
        for origin, status in ((url.replace("https", "http"), 200), ("https://example.org", 403)):
            answer = client.post(f"{url}/v1/completions", json=COMPLETION, headers={"Origin": origin})
            assert answer.status_code == status


def test_clients_that_do_not_trust_it_or_are_too_old_are_refused(url):
    with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx2.get(f"{url}/health")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with connect(url) as connection, pytest.raises((ssl.SSLError, ConnectionResetError)):
        old.wrap_socket(connection)


def test_clients_without_tls_are_disconnected(url):
    with connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_to_end(connection) == b""


def test_failed_handshakes_are_disconnected(url):
    with connect(url) as connection:
        connection.settimeout(60)
        assert read_to_end(connection) == b""


@pytest.mark.slow
def test_a_client_that_stops_reading_is_disconnected_under_tls(demo, files):
    trust = ssl.create_default_context(cafile=files[0])
    with (
        serving(
            demo, public_policy(tls=load_tls_context(*files)), ConnectionLimits(reader_timeout_s=READER_S)
        ) as url,
        connect_narrow(url) as plain,
        trust.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        wrapped.sendall(completion_request(f"Authorization: Bearer {KEY}", **LONG))
        wrapped.recv(1)
        wait_until_idle(demo)
        assert b"[DONE]" not in read_to_end(wrapped)


def test_certificate_and_key_may_lie_in_one_file(files, tmp_path):
    both = tmp_path / "both.pem"
    both.write_text("".join(Path(file).read_text() for file in files))
    assert load_tls_context(str(both), None)
    assert load_tls_context(None, None) is None


def test_invalid_files_are_reported(files, tmp_path):
    certificate, key = files
    nothing, text = str(tmp_path / "nothing"), tmp_path / "text"
    text.write_text("no PEM")
    for wrong, told in [
        ((nothing, key), "cannot read .*nothing"),
        ((certificate, nothing), "cannot read .*nothing"),
        ((str(tmp_path), key), "cannot read"),
        ((str(text), key), "not there in PEM"),
        ((certificate, str(text)), "not there in PEM"),
        ((certificate, None), "not there in PEM"),
        ((certificate, made(tmp_path, "other")[1]), "the key does not match"),
        (made(tmp_path, "locked", "-passout", "pass:secret"), "is encrypted"),
        ((None, key), "--tls-key needs --tls-cert"),
    ]:
        with pytest.raises(UsageError, match=told):
            load_tls_context(*wrong)
