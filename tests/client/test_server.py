"""Connection failures of our own client name the remedy."""

import re
import socket
import subprocess
import threading
from contextlib import closing, contextmanager

import pytest

from localllm.client.server import ServerClient
from localllm.errors import AccessDenied, Busy, LocalLLMError, ServerUnreachable
from localllm.server.access import load_tls_context
from tests.server.attacks.wire import KEY, public_policy
from tests.server.conftest import serving


def test_a_missing_key_names_the_variable(demo, monkeypatch):
    monkeypatch.delenv("LOCALLLM_API_KEY", raising=False)
    with serving(demo, public_policy(keys=(KEY,))) as url:
        with pytest.raises(AccessDenied, match="requires an API key; set LOCALLLM_API_KEY to one of its keys"):
            ask(url)
        monkeypatch.setenv("LOCALLLM_API_KEY", KEY)
        assert [model["name"] for model in ask(url)["models"]] == ["demo"]


def test_an_untrusted_certificate_names_the_variable(demo, tmp_path, monkeypatch):
    made, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", made]
    subprocess.run(command, check=True, capture_output=True)
    with serving(demo, public_policy(keys=(KEY,), tls=load_tls_context(str(made), str(key)))) as url:
        monkeypatch.setenv("LOCALLLM_API_KEY", KEY)
        with pytest.raises(ServerUnreachable, match=r"is not trusted .* SSL_CERT_FILE"):
            ask(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(made))
        assert ask(url)["server"] == "localllm"


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "(not an HTTP response)"),
        (b"HTTP/1.1 ok\r\n\r\n", "(not an HTTP response)"),
        (HEAD + b"".join(b"a%d: b\r\n" % number for number in range(201)), "(too many headers)"),
        (HEAD + b"a: " + b"b" * 70_000, "(the response is incomplete)"),
        (HEAD + b"Content-Length: many\r\n\r\n", "closed the connection"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\nz\r\n", "closed the connection"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 9\r\n\r\n{", "closed the connection"),
        (HEAD + b"Content-Length: 2\r\n\r\n[]", "is not localllm; start one with `localllm serve`"),
    ],
)
def test_a_response_of_another_program_is_one_error_message(response, fault):
    with answering(response) as server:
        with pytest.raises(LocalLLMError, match=re.escape(fault)) as caught:
            server.request_json("/x")
        assert server.url in str(caught.value)


def test_a_stream_ends_with_its_last_line_or_an_error():
    error = b'{"error": {"kind": "Busy", "message": "try later"}}'
    chunks = b'9;x=y\r\n{"a": 1}\n\r\n8\r\n{"b": 2}\r\n0\r\nend: yes\r\n\r\n'  # with an extension and a trailer
    with answering(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks) as server:
        assert list(server.stream_json("/x", {})) == [{"a": 1}, {"b": 2}]
    with answering(HEAD + b"Content-Length: 51\r\n\r\n" + error) as server, pytest.raises(Busy, match="try later"):
        next(server.stream_json("/x", {}))


@contextmanager
def answering(response):
    """A client of a program that sends these bytes and ends."""

    def answer():
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(response)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with closing(ServerClient(f"http://127.0.0.1:{listener.getsockname()[1]}")) as server:
            yield server
        thread.join()


def ask(url):
    with closing(ServerClient(url)) as server:
        return server.request_json("/localllm/ps")
