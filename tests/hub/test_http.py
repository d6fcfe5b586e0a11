from pathlib import Path
from threading import Event

import pytest
from huggingface_hub import constants

from localllm.errors import NetworkError
from localllm.hub import http
from localllm.hub.http import hub_access
from localllm.hub.names import RepoName

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_without_settings_nothing_is_shown() -> None:
    access = hub_access({})
    assert (access.token, access.proxies) == (None, {})


def test_a_token_is_named_by_where_it_is(tmp_path: Path) -> None:
    assert hub_access({"HF_TOKEN": " "}).token is None
    (tmp_path / "token").write_text("hf_secret\n")
    assert hub_access({}).token == str(tmp_path / "token")
    access = hub_access({"HF_TOKEN": "hf_secret"})
    assert access.token == "HF_TOKEN"
    assert "hf_secret" not in repr(access)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://proxy:3128", "http://proxy:3128"),
        ("http://name:secret@proxy:3128", "http://***@proxy:3128"),
        ("socks5://name:sec@ret@proxy", "socks5://***@proxy"),
        ("name:secret@proxy:3128", "***@proxy:3128"),
    ],
)
def test_passwords_of_proxies_are_left_out(monkeypatch: pytest.MonkeyPatch, address: str, shown: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", address)
    assert hub_access({}).proxies["https"] == shown


def test_a_password_of_a_mirror_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://name:secret@mirror/hub")
    assert hub_access({}).endpoint == "https://***@mirror/hub"


@pytest.mark.parametrize("proxy", [None, "http://user:secret@127.0.0.1:9"])
def test_without_a_network_one_line_says_so_at_once(monkeypatch, proxy):
    """Covers a name that does not resolve and an unreachable proxy; retries would not help."""
    monkeypatch.setattr(constants, "ENDPOINT", "https://nowhere.invalid")
    if proxy:
        monkeypatch.setenv("https_proxy", proxy)
    says = []
    http.close()
    with pytest.raises(NetworkError) as refused, http.translate_errors(RepoName("org/x")):
        http.retrying("org/x", says.append, Event())(http.client().get, constants.ENDPOINT)
    http.close()
    assert says == []
    words = (
        "nowhere.invalid cannot be reached through the proxy http://***@127.0.0.1:9"
        if proxy
        else "cannot be resolved"
    )
    assert words in refused.value.message
    assert "secret" not in str(refused.value)
