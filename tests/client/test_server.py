"""Connection failures of our own client name the remedy."""

import subprocess
from contextlib import closing

import pytest

from localllm.client.server import ServerClient
from localllm.errors import AccessDenied, ServerUnreachable
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


def ask(url):
    with closing(ServerClient(url)) as server:
        return server.request_json("/localllm/ps")
