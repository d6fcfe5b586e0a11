from pathlib import Path

import pytest
from huggingface_hub import constants

from localllm.hub.access import hub_access

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_nothing_set_is_nothing_shown() -> None:
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
