"""A hub that is reachable through a proxy only."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.hub.loopback import LoopbackHub
from tests.hub.models import model_files, weights


class Proxy(ThreadingHTTPServer):
    """Forwards requests for http://hub.invalid to the loopback hub, including redirects."""

    daemon_threads = True

    def __init__(self, hub):
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub
        self.asked = []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.server.asked.append(urlsplit(self.path).netloc)
        target = self.path.replace("http://hub.invalid", self.server.hub.url)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        with httpx2.Client(trust_env=False) as client:
            reply = client.request(self.command, target, headers=headers)
        self.send_response(reply.status_code)
        for name, value in reply.headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-encoding", "content-length"):
                self.send_header(name, value.replace(self.server.hub.url, "http://hub.invalid"))
        self.send_header("Content-Length", str(len(reply.content)))
        self.end_headers()
        self.wfile.write(reply.content)


@pytest.fixture
def proxy():
    with LoopbackHub() as hub:
        hub.large_files = "direct"
        hub.add("org/tiny", model_files())
        with Proxy(hub) as proxy:
            thread = threading.Thread(target=proxy.serve_forever)
            thread.start()
            yield proxy
            proxy.shutdown()
            thread.join()


def pull(tmp_path, **settings):
    kept = {
        n: v for n, v in os.environ.items() if not n.startswith(("HF_", "LOCALLLM_")) and "proxy" not in n.lower()
    }
    places = {"HF_HOME": str(tmp_path / "hf"), "LOCALLLM_HOME": str(tmp_path / "home")}
    return subprocess.run(
        [sys.executable, "-m", "localllm", "pull", "org/tiny"],
        env=kept | places | {"HF_ENDPOINT": "http://hub.invalid"} | settings,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
def test_everything_goes_through_the_proxy(proxy, tmp_path):
    done = pull(tmp_path, HTTP_PROXY=f"http://127.0.0.1:{proxy.server_port}")
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == weights()
    assert set(proxy.asked) == {"hub.invalid"}


@pytest.mark.slow
def test_no_proxy_hosts_bypass_the_proxy(proxy, tmp_path):
    address = f"http://127.0.0.1:{proxy.server_port}"
    done = pull(tmp_path, HTTP_PROXY=address, NO_PROXY="127.0.0.1", HF_ENDPOINT=proxy.hub.url)
    assert done.returncode == 0, done.stderr
    assert proxy.asked == []
