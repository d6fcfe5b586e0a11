import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.hub import faults
from tests.hub.loopback import LoopbackHub
from tests.work import without_collections

WEIGHTS = bytes(range(256)) * 1000
FILES = {
    "config.json": b'{"a": 1}',
    "empty": b"",
    "modèle 1.safetensors": b"unicode",
    "onnx/deep/model.bin": b"\0" * 5000,
    "model.safetensors": WEIGHTS,
}
WEIGHTS_URL = "/org/tiny/resolve/main/model.safetensors"


@pytest.fixture
def hub():
    with LoopbackHub() as hub:
        hub.add("org/tiny", FILES)
        yield hub


@pytest.fixture
def client(hub):
    with httpx2.Client(base_url=hub.url, follow_redirects=True, timeout=60, trust_env=False) as client:
        yield client


def test_downloads_match_in_the_layout_of_the_real_cache(hub, tmp_path):
    commit = hub.add("org/tiny", FILES | {"added": b"later"}, refs=["v1"])
    root = tmp_path / "models--org--tiny"
    for revision, files in {"main": FILES, "v1": FILES | {"added": b"later"}}.items():
        folder = snapshot_download("org/tiny", revision=revision, endpoint=hub.url, cache_dir=tmp_path)
        found = {path: (Path(folder) / path).read_bytes() for path in files}
        assert found == files
    assert (root / "refs" / "v1").read_text() == commit
    shared = hub.repositories["org/tiny"].commits[commit]
    assert {blob.name for blob in (root / "blobs").iterdir()} == {file.etag for file in shared.values()}


@pytest.mark.parametrize("large_files", ["cdn", "redirect", "direct"])
def test_large_files_may_lie_in_three_ways(hub, tmp_path, large_files):
    hub.large_files = large_files
    path = hf_hub_download("org/tiny", "model.safetensors", endpoint=hub.url, cache_dir=tmp_path)
    assert Path(path).read_bytes() == WEIGHTS
    assert any(request.server == "cdn" for request in hub.requests) == (large_files == "cdn")


def test_a_token_is_never_sent_to_another_host(hub, tmp_path):
    snapshot_download("org/tiny", endpoint=hub.url, cache_dir=tmp_path, token="hf_somebody")
    bearers = {(request.server, request.headers.get("authorization")) for request in hub.requests}
    assert bearers == {("hub", "Bearer hf_somebody"), ("cdn", None)}


def test_the_facts_of_a_model(hub):
    info = HfApi(endpoint=hub.url).model_info("org/tiny", files_metadata=True)
    assert info.sha == hub.repositories["org/tiny"].refs["main"]
    assert (info.gated, info.private) == (False, False)
    files = {file.rfilename: file for file in info.siblings}
    assert {path: file.size for path, file in files.items()} == {path: len(body) for path, body in FILES.items()}
    assert (
        files["model.safetensors"].lfs.sha256
        == hub.repositories["org/tiny"].commits[info.sha]["model.safetensors"].sha256
    )
    assert files["config.json"].lfs is None
    assert HfApi(endpoint=hub.url).model_info("org/tiny").siblings[0].size is None


def test_a_long_listing_comes_in_pages_and_a_folder_alone(hub):
    hub.add("org/many", {f"a/{number:05}": b"" for number in range(10_000)} | {"b": b""})
    api = HfApi(endpoint=hub.url)
    entries = list(api.list_repo_tree("org/many", recursive=True))
    assert len({entry.path for entry in entries}) == len(entries) == 10_002
    assert sum("/tree/" in request.target for request in hub.requests) == 11
    assert {entry.path for entry in api.list_repo_tree("org/many")} == {"a", "b"}
    assert len(list(api.list_repo_tree("org/many", "a", recursive=True))) == 10_000


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "a\0b", "a\\b", "x" * 5000, "modèle", "a\x1b[2J", "a//b", "."]
)
def test_a_listing_may_name_anything(hub, name):
    hub.add("org/evil", {name: b"evil"})
    api = HfApi(endpoint=hub.url)
    assert [file.rfilename for file in api.model_info("org/evil").siblings] == [name]
    assert name in {entry.path for entry in api.list_repo_tree("org/evil", recursive=True)}


def test_a_commit_may_be_anything(hub):
    hub.add("org/evil", FILES, commit="../../evil")
    assert HfApi(endpoint=hub.url).model_info("org/evil").sha == "../../evil"


@pytest.mark.parametrize(
    ("repo", "revision", "token", "error", "status"),
    [
        ("org/nothing", None, False, RepositoryNotFoundError, 401),
        ("org/nothing", None, "hf_somebody", RepositoryNotFoundError, 404),
        ("org/private", None, False, RepositoryNotFoundError, 401),
        ("org/private", None, "hf_somebody", RepositoryNotFoundError, 404),
        ("org/tiny", "v9", False, RevisionNotFoundError, 404),
        ("org/tiny", None, "garbage", HfHubHTTPError, 401),
    ],
)
def test_missing_entries_give_the_error_of_the_hub(hub, repo, revision, token, error, status):
    hub.add("org/private", FILES, private=True, readers=frozenset({"hf_reader"}))
    with pytest.raises(error) as raised:
        HfApi(endpoint=hub.url).model_info(repo, revision=revision, token=token)
    assert type(raised.value) is error
    assert raised.value.response.status_code == status


@pytest.mark.parametrize(("token", "status"), [(False, 401), ("garbage", 401), ("hf_somebody", 403)])
def test_a_gated_model_can_be_seen_and_not_read(hub, tmp_path, token, status):
    hub.add("org/gated", FILES, gated="manual", readers=frozenset({"hf_reader"}))
    if token != "garbage":
        assert HfApi(endpoint=hub.url).model_info("org/gated", token=token).gated == "manual"
    with pytest.raises(GatedRepoError) as raised:
        hf_hub_download("org/gated", "config.json", endpoint=hub.url, cache_dir=tmp_path, token=token)
    assert raised.value.response.status_code == status
    snapshot_download("org/gated", endpoint=hub.url, cache_dir=tmp_path, token="hf_reader")


def test_a_file_that_does_not_exist(hub, tmp_path):
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download("org/tiny", "nothing", endpoint=hub.url, cache_dir=tmp_path)


def test_a_model_that_moved_is_found(hub, tmp_path):
    hub.moved["old/name"] = "org/tiny"
    path = hf_hub_download("old/name", "config.json", endpoint=hub.url, cache_dir=tmp_path)
    assert Path(path).read_bytes() == FILES["config.json"]
    assert HfApi(endpoint=hub.url).model_info("old/name").id == "org/tiny"


@pytest.mark.parametrize(
    ("asked", "status", "got"),
    [
        ("bytes=0-9", 206, WEIGHTS[:10]),
        ("bytes=255990-", 206, WEIGHTS[255990:]),
        ("bytes=255990-999999", 206, WEIGHTS[255990:]),
        ("bytes=-5", 206, WEIGHTS[-5:]),
        ("bytes=256000-", 416, b""),
        ("bytes=-", 200, WEIGHTS),
    ],
)
def test_ranges(client, hub, asked, status, got):
    answer = client.get(WEIGHTS_URL, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (status, got)
    assert hub.sent("/cdn/") == len(got)
    assert hub.requests[-1].range == asked
    changed = client.get(WEIGHTS_URL, headers={"Range": asked, "If-Range": '"another"'})
    assert (changed.status_code, len(changed.content)) == (200, len(WEIGHTS))


def test_small_files_are_compressed_for_clients_that_accept_it(client):
    url, part = "/org/tiny/resolve/main/config.json", {"Range": "bytes=0-2"}
    assert client.get(url, headers=part | {"Accept-Encoding": "gzip"}).content == FILES["config.json"]
    assert client.get(url, headers=part | {"Accept-Encoding": "identity"}).content == FILES["config.json"][:3]


def broken_off(client, error):
    got = bytearray()
    with pytest.raises(error), client.stream("GET", WEIGHTS_URL, headers={"Range": "bytes=1000-"}) as answer:
        assert answer.headers["Content-Length"] == str(len(WEIGHTS) - 1000)
        for chunk in answer.iter_raw():
            got += chunk
    return got


@pytest.mark.quick_every(3)
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (faults.reset, httpx2.ReadError),
        (faults.truncated, httpx2.RemoteProtocolError),
        (faults.stalled, httpx2.ReadTimeout),
    ],
)
@pytest.mark.parametrize("at", [1000, 5000, 255_999])
def test_a_body_is_cut_at_the_given_byte(client, hub, fault, error, at):
    ordered = hub.disturb(fault(at), "model.safetensors", times=2)
    assert client.get(WEIGHTS_URL, headers={"Range": "bytes=0-999"}).content == WEIGHTS[:1000]  # at is not in it
    with without_collections():
        client.timeout = 1 if fault is faults.stalled else 60  # in which what precedes the fault arrives
        assert [broken_off(client, error) for _ in range(2)] == [WEIGHTS[1000:at]] * 2
        client.timeout = 60
    assert ordered.met == 2
    assert client.get(WEIGHTS_URL).content == WEIGHTS


def test_a_hub_may_not_answer_at_all(client, hub):
    hub.disturb(faults.silent, "config.json", method="HEAD")
    assert client.get("/org/tiny/resolve/main/config.json").status_code == 200
    client.timeout = 0.3
    with pytest.raises(httpx2.ReadTimeout):
        client.head("/org/tiny/resolve/main/config.json")


def test_bodies_that_lie(client, hub):
    hub.disturb(faults.flipped(777), "/cdn/")
    assert client.get(WEIGHTS_URL).content == WEIGHTS[:777] + bytes([WEIGHTS[777] ^ 1]) + WEIGHTS[778:]
    hub.disturb(faults.longer(b"more"), "/cdn/")
    assert client.get(WEIGHTS_URL, headers={"Range": "bytes=-4"}).content == WEIGHTS[-4:] + b"more"
    hub.disturb(faults.ranges_ignored, "/cdn/")
    whole = client.get(WEIGHTS_URL, headers={"Range": "bytes=-4"})
    assert (whole.status_code, whole.content, "Content-Range" in whole.headers) == (200, WEIGHTS, False)


def test_headers_that_lie(client, hub):
    client.follow_redirects = False
    for method in ("HEAD", "GET"):
        hub.disturb(faults.announced(7), "model.safetensors", method=method)
    assert client.head(WEIGHTS_URL).headers["X-Linked-Size"] == "7"
    hub.disturb(faults.headed({"X-Linked-ETag": '"../evil"', "X-Repo-Commit": None}), method="HEAD")
    answer = client.head(WEIGHTS_URL)
    assert (answer.headers["X-Linked-ETag"], "X-Repo-Commit" in answer.headers) == ('"../evil"', False)
    store = client.head(WEIGHTS_URL).headers["Location"]
    hub.disturb(faults.announced(7), "/cdn/")
    hub.disturb(faults.headed({"ETag": '"another"'}), "/cdn/", times=1)
    part = {"Range": "bytes=0-3"}
    assert client.get(store, headers=part).headers["Content-Range"] == "bytes 0-3/7"
    assert len({client.get(store, headers=part).headers["ETag"] for _ in range(2)}) == 2


@pytest.mark.parametrize("retry_after", [None, 3])
def test_refusals_end_after_their_times(client, hub, retry_after):
    hub.disturb(faults.busy(retry_after), times=2)
    answers = [client.get("/api/models/org/tiny") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [429, 429, 200]
    assert answers[0].headers.get("Retry-After") == (retry_after and str(retry_after))
    hub.disturb(faults.refused(503), "/cdn/", times=3)
    assert [client.get(WEIGHTS_URL).status_code for _ in range(4)] == [503, 503, 503, 200]


def test_redirects_to_other_hosts_and_dead_ends(client, hub):
    hub.disturb(faults.redirected(f"{hub.cdn}/cdn/nothing"), "config.json")
    assert (
        client.get("/org/tiny/resolve/main/config.json", headers={"Authorization": "Bearer hf_x"}).status_code
        == 403
    )
    assert (hub.requests[-1].server, hub.requests[-1].headers.get("authorization")) == ("cdn", None)
    hub.disturb(faults.redirected("?"), "/resolve/", method=None, times=None)
    with pytest.raises(httpx2.TooManyRedirects):
        client.get(WEIGHTS_URL)


def test_a_listing_may_lie_about_one_file(hub):
    def resize(listing):
        next(entry for entry in listing if entry["path"] == "model.safetensors")["lfs"]["size"] = 3

    hub.disturb(faults.edited(resize), "/tree/")
    for size in (3, len(WEIGHTS)):
        entries = {entry.path: entry for entry in HfApi(endpoint=hub.url).list_repo_tree("org/tiny")}
        assert entries["model.safetensors"].lfs.size == size


def test_a_rate_leaves_time_to_break_off(client, hub):
    hub.rate = 500_000
    begin = time.monotonic()
    assert client.get(WEIGHTS_URL).content == WEIGHTS
    assert time.monotonic() - begin > 0.4


def test_it_stops_at_once_with_hanging_requests():
    before = threading.active_count()
    with LoopbackHub() as hub, httpx2.Client(base_url=hub.url, trust_env=False) as client:
        hub.add("org/tiny", FILES)
        hub.large_files = "direct"
        hub.disturb(faults.stalled(100))
        with client.stream("GET", WEIGHTS_URL) as answer:
            next(answer.iter_raw())
            idle = client.head(WEIGHTS_URL)
            hub.__exit__(None, None, None)
            assert idle.status_code == 200
            assert threading.active_count() == before


def test_another_process_reaches_it_by_its_address(hub, tmp_path):
    names = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    script = "from huggingface_hub import snapshot_download as s; print(s('org/tiny'))"
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | names, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / done.stdout.decode().strip() / "model.safetensors").read_bytes() == WEIGHTS


def test_its_own_faults_are_not_silent():
    with pytest.raises(ZeroDivisionError), LoopbackHub() as hub, httpx2.Client(trust_env=False) as client:
        hub.disturb(lambda _: 1 / 0)
        with pytest.raises(httpx2.RemoteProtocolError):
            client.get(hub.url)
