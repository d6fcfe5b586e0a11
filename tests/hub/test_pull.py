"""Downloads from a real server with realistic faults."""

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from localllm.errors import (
    AccessDenied,
    DamagedModel,
    DiskFull,
    LocalLLMError,
    ModelNotFound,
    NetworkError,
    UnsupportedModel,
)
from localllm.hub import partial_file, pull
from localllm.hub.listing import fetch_listing
from localllm.hub.names import RepoName, parse_name
from localllm.hub.resolve import resolve_model
from tests.hub import faults
from tests.hub.models import Watcher, model_files, sha256, weights

NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
    "model.safetensors",
}
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(partial_file, "PART_BYTES", 8_192)


@pytest.fixture
def tiny(hub, cache):
    hub.add("org/tiny", model_files())
    return hub


def fetch(name="org/tiny", watcher=None):
    watcher = watcher or Watcher()
    repo = parse_name(name)
    assert isinstance(repo, RepoName)
    return pull.pull(pull.plan_pull(repo, watcher.say), watcher), watcher


def test_exactly_the_files_of_the_model_are_fetched(tiny, cache):
    folder, watcher = fetch()
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == NEEDED
    for name in NEEDED:
        assert (folder / name).read_bytes() == model_files()[name]
    assert set(watcher.finished) == NEEDED
    assert watcher.came == watcher.order.missing_bytes == watcher.order.total_bytes
    assert resolve_model("org/tiny").path == folder


def test_files_with_equal_content_are_fetched_once(hub, cache):
    hub.add("org/tiny", model_files(**{"chat_template.jinja": b"{{ 1 }}", "chat_template.json": b"{{ 1 }}"}))
    folder, watcher = fetch()
    assert (folder / "chat_template.jinja").samefile(folder / "chat_template.json")
    assert watcher.came == watcher.order.total_bytes == sum(len(model_files()[name]) for name in NEEDED) + 7


def test_a_cache_without_links_stores_content_once(hub, cache, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS_WARNING", True)
    monkeypatch.setattr("huggingface_hub.file_download._are_symlinks_supported_in_dir", {})
    hub.add("org/tiny", model_files(**{"chat_template.jinja": b"{{ 1 }}", "chat_template.json": b"{{ 1 }}"}))
    folder, watcher = fetch()
    files = [path for path in cache.rglob("*") if path.is_file() and "snapshots" in path.parts]
    assert {path.name for path in files} == NEEDED | {"chat_template.jinja", "chat_template.json"}
    assert not any(path.is_symlink() for path in files)
    assert not list((cache / "models--org--tiny" / "blobs").iterdir())
    assert (folder / "model.safetensors").read_bytes() == weights()
    again, watcher = fetch()
    assert (again, watcher.came, watcher.finished) == (folder, 0, [])


def test_the_cache_matches_that_of_huggingface_hub(tiny, cache, tmp_path):
    folder, _ = fetch()
    theirs = snapshot_download(
        "org/tiny", cache_dir=tmp_path / "theirs", endpoint=tiny.url, allow_patterns=sorted(NEEDED)
    )
    found = {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for root in (cache, tmp_path / "theirs")
        for path in root.rglob("*")
        if path.is_file()
        and ".locks" not in path.parts
        and path.name != "CACHEDIR.TAG"
        and "trees" not in path.parts
    }
    for root in (cache, tmp_path / "theirs"):
        for name, content in found.items():
            path = root / name
            assert (os.readlink(path) if path.is_symlink() else path.read_bytes()) == content, path
    assert Path(theirs).name == folder.name


def test_files_fetched_by_other_tools_are_reused(tiny, cache):
    snapshot_download("org/tiny", cache_dir=cache, endpoint=tiny.url)
    before = tiny.sent("resolve|cdn")
    _, watcher = fetch()
    assert tiny.sent("resolve|cdn") == before
    assert (watcher.came, watcher.finished) == (0, [])


def test_a_complete_model_causes_no_request(tiny, cache):
    folder, _ = fetch()
    before = len(tiny.requests)
    assert resolve_model("org/tiny").path == folder
    assert len(tiny.requests) == before


def test_the_branch_moves_after_the_new_commit_is_complete(tiny, cache):
    old, _ = fetch()
    tiny.add("org/tiny", model_files(**{"model.safetensors": weights(seed=1)}))
    tiny.disturb(faults.refused(403, None, "no"), WEIGHTS, times=None)
    with pytest.raises(AccessDenied):
        fetch()
    assert resolve_model("org/tiny").path == old
    tiny.faults.clear()
    new, watcher = fetch()
    assert resolve_model("org/tiny").path == new != old
    assert watcher.came == len(weights(seed=1))


def test_a_revision_is_a_branch_a_tag_or_a_commit(tiny, cache):
    commit = tiny.add("org/tiny", model_files(added=b"later"), refs=["v1", "refs/pr/2"])
    assert fetch("org/tiny@v1")[0].name == commit
    assert fetch("org/tiny@refs/pr/2")[0].name == commit
    assert fetch(f"org/tiny@{commit}")[0].name == commit
    assert resolve_model("org/tiny@v1").path.name == commit
    with pytest.raises(ModelNotFound, match="org/tiny is not on this machine"):
        resolve_model("org/tiny")


# What passes: the pull succeeds, with every byte as it should be


@pytest.mark.quick_every(5)
@pytest.mark.parametrize(
    ("change", "times"),
    [
        (faults.reset(20_000), 1),
        (faults.reset(20_000), 3),
        (faults.truncated(20_000), 1),
        (faults.truncated(8_192), 2),
        (faults.longer(b"and more"), 3),
        (faults.ranges_ignored, None),
        (faults.stalled(20_000), 1),
        (faults.silent, 1),
        (faults.refused(500), 2),
        (faults.refused(502), 2),
        (faults.refused(503), 4),
        (faults.busy(), 2),
        (faults.busy(1), 1),
        (faults.flipped(20_000), 1),
    ],
)
def test_a_passing_fault_of_the_weights(tiny, cache, change, times):
    fault = tiny.disturb(change, WEIGHTS, times=times)
    folder, _ = fetch()
    assert fault.met
    assert (folder / "model.safetensors").read_bytes() == model_files()["model.safetensors"]


@pytest.mark.quick_every(13)
@pytest.mark.parametrize("target", ["/api/models/org/tiny/revision", "/tree/", "config.json"])
@pytest.mark.parametrize("change", [faults.refused(500), faults.busy(), faults.reset(0), faults.silent])
def test_a_transient_fault_before_the_download(tiny, cache, target, change, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    fault = tiny.disturb(change, target)
    fetch()
    assert fault.met == 1


def test_only_the_missing_range_is_requested_again(tiny, cache):
    tiny.disturb(faults.reset(20_000), WEIGHTS)
    tiny.disturb(faults.truncated(30_000), WEIGHTS)
    _, watcher = fetch()
    assert tiny.sent("/cdn/.*") <= len(weights()) + len(model_files()["tokenizer.json"])
    assert watcher.came == watcher.order.missing_bytes


def test_a_flipped_bit_is_reported_and_the_file_refetched(tiny, cache):
    tiny.disturb(faults.flipped(20_000), WEIGHTS)
    _, watcher = fetch()
    assert "model.safetensors: the content does not have the announced digest, fetching it again" in watcher.said
    assert watcher.came == watcher.order.missing_bytes  # what came in vain was taken back


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("byte", range(0, 40_000, 3_989))
def test_any_flipped_bit_is_detected(tiny, cache, byte):
    tiny.disturb(faults.flipped(byte), WEIGHTS, times=None)
    with pytest.raises(DamagedModel, match=r"model.safetensors of org/tiny twice had a digest other than"):
        fetch()
    with pytest.raises(ModelNotFound):
        resolve_model("org/tiny")


def test_retry_after_is_respected(tiny, cache):
    tiny.disturb(faults.busy(1), WEIGHTS)
    _, watcher = fetch()
    assert "model.safetensors: status 429; retrying in 1 s" in watcher.said


# What does not: one sentence, and nothing lost


def host(hub):
    return hub.url.removeprefix("http://")


@pytest.mark.quick_every(13)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            faults.reset(20_000),
            NetworkError,
            r"{host} does not provide org/tiny: .*(reset|closed|disconnect).*; check the connection and "
            "HF_ENDPOINT, then run the same command again",
        ),
        (faults.truncated(20_000), NetworkError, "{host} does not provide org/tiny: peer closed connection"),
        (faults.stalled(20_000), NetworkError, "{host} does not provide org/tiny: no data within 1 s; check"),
        (faults.refused(500), NetworkError, "{host} does not provide org/tiny: status 500; check"),
        (faults.busy(), NetworkError, "{host} returned status 429: too many requests; try again later"),
        (faults.busy(3600), NetworkError, "{host} returned status 429: too many requests; try again in 3600 s"),
        (
            faults.announced(39_000),
            NetworkError,
            "the Hub sends bytes .*/39000 of model.safetensors instead of bytes .*; try again",
        ),
        (
            faults.headed({"Content-Range": f"bytes {'9' * 5000}-1/40000"}),
            NetworkError,
            "the Hub sends bytes 9+ of model.safetensors instead of bytes .*; try again",
        ),
        (
            faults.refused(404, "EntryNotFound"),
            ModelNotFound,
            "{host} lists a file of org/tiny but does not have it; try again later",
        ),
        (
            faults.refused(401),
            AccessDenied,
            "{host} requires a login for org/tiny; log in with `hf auth login`, or set",
        ),
        (faults.refused(403), AccessDenied, "{host} denies you access to org/tiny; see {url}/org/tiny; log in"),
        (
            faults.refused(403, "GatedRepo"),
            AccessDenied,
            "org/tiny is gated: its authors require you to accept their terms; log in with `hf auth login`, or "
            "set HF_TOKEN, then visit {url}/org/tiny and accept them",
        ),
        (faults.redirected("?"), NetworkError, "{host} does not provide org/tiny: it redirects in circles"),
        (faults.redirected("ftp://elsewhere/"), NetworkError, "{host} does not provide org/tiny: .*ftp"),
    ],
)
def test_a_lasting_fault_of_the_weights(tiny, cache, change, error, message):
    tiny.disturb(change, WEIGHTS, times=None)
    with pytest.raises(error, match=message.format(host=host(tiny), url=tiny.url)):
        fetch()
    tiny.faults.clear()
    folder, _ = fetch()
    assert (folder / "model.safetensors").read_bytes() == weights()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "org/nope",
            "{host} has no repository org/nope, or it is private; check the name; if it is private, log in",
        ),
        ("org/tiny@v9", "org/tiny has no revision v9; leave it out"),
        ("org/tiny:Q4_K_M", "org/tiny has no GGUF files; use another edition of the model"),
    ],
)
def test_missing_repositories_and_revisions(tiny, cache, name, message):
    with pytest.raises((ModelNotFound, UnsupportedModel), match=message.format(host=host(tiny))) as error:
        fetch(name)
    assert error.value.exit_code == 8


def test_a_rejected_login_is_reported(tiny, cache, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    tiny.disturb(faults.refused(401, None, "Invalid credentials in Authorization header"), WEIGHTS, times=None)
    with pytest.raises(AccessDenied, match=f"{host(tiny)} does not accept your token for org/tiny; log in with"):
        fetch()


def test_a_gated_repository_names_the_next_step(tiny, cache, monkeypatch):
    tiny.add("org/gated", model_files(), gated="manual")
    with pytest.raises(AccessDenied, match="log in with `hf auth login`, or set HF_TOKEN, then visit"):
        fetch("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(AccessDenied, match=f"accept their terms; visit {tiny.url}/org/gated and accept them"):
        fetch("org/gated")
    tiny.add("org/gated", model_files(), readers=frozenset(["hf_friend"]))
    monkeypatch.setenv("HF_TOKEN", "hf_friend")
    fetch("org/gated")


def test_an_expired_url_is_requested_again(tiny, cache):
    """URLs of the file host are valid for an hour."""
    tiny.disturb(faults.reset(len(weights()) // 2), "/cdn/")
    expired = tiny.disturb(faults.refused(403, None, "Request has expired"), "/cdn/", times=3)
    folder, watcher = fetch()
    assert expired.met == 3
    assert (folder / "model.safetensors").read_bytes() == weights()
    assert any("status 403; retrying" in line for line in watcher.said)


def test_a_host_of_files_that_refuses_every_address_is_given_up(tiny, cache):
    tiny.disturb(faults.refused(403, None, "no"), "/cdn/", times=None)
    with pytest.raises(NetworkError, match="does not provide org/tiny: status 403"):
        fetch()


@pytest.mark.parametrize(
    "address", ["\x1b]0;title\x07://x/", "ftp://x/\x9b2J", "http://\x1b[2J\t/", "//\x85:99999/"]
)
def test_messages_of_a_hub_are_one_line_without_control_characters(tiny, cache, address):
    tiny.disturb(faults.redirected(address), WEIGHTS, times=None)
    with pytest.raises(NetworkError) as refused:
        fetch()
    assert str(refused.value).isprintable()


def test_a_gated_original_names_the_edition_that_needs_no_login(tiny, cache):
    tiny.add("meta-llama/Llama-3.2-1B-Instruct", model_files(), gated="manual")
    with pytest.raises(AccessDenied, match=r"and accept them, or use llama3\.2:1b, which needs no login"):
        fetch("meta-llama/Llama-3.2-1B-Instruct")


def test_a_token_is_not_forwarded_to_another_host(tiny, cache, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_friend")
    fetch()
    bearers = {(request.server, request.headers.get("authorization")) for request in tiny.requests}
    assert bearers == {("hub", "Bearer hf_friend"), ("cdn", None)}


def test_no_connection(tiny, cache, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NetworkError, match=r"127\.0\.0\.1:9 does not provide org/tiny: .*refused.*; check"):
        fetch()


def test_a_password_in_the_hubs_url_is_not_printed(tiny, cache, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:secret@127.0.0.1:9")
    with pytest.raises(NetworkError, match=r"\*\*\*@127\.0\.0\.1:9 does not provide org/tiny: ") as error:
        fetch()
    assert "secret" not in str(error.value)


@pytest.mark.quick_every(3)
@pytest.mark.parametrize(
    "path",
    [
        "../evil.gguf",
        "/etc/evil.gguf",
        "a/../../evil.gguf",
        "a//evil.gguf",
        "./evil.gguf",
        "nul\0.gguf",
        "back\\slash.gguf",
        "new\nline.gguf",
        "x" * 300 + ".gguf",
        "/".join(["deep"] * 300) + ".gguf",
        "half\ud800.gguf",
        "title\x9d.gguf",
    ],
)
def test_a_hostile_name_is_refused_before_it_becomes_a_path(tiny, cache, path):
    tiny.disturb(faults.edited(lambda entries: entries[-1].update(path=path)), "/tree/", times=None)
    with pytest.raises(NetworkError, match=r"the Hub returned a file named .* do not trust this hub"):
        fetch()
    assert not [file for file in cache.parent.rglob("*") if "evil" in file.name]


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("oid", "../../../evil"),
        ("oid", None),
        ("oid", "0" * 39),
        ("size", -1),
        ("size", "12"),
        ("size", 2**60),
        ("lfs", {"oid": "../" * 20, "size": 1, "pointerSize": 1}),
        ("lfs", {"size": 1}),
        ("lfs", 3),
    ],
)
def test_a_hostile_fact_is_refused(tiny, cache, fact, value):
    tiny.disturb(faults.edited(lambda entries: entries[-1].update({fact: value})), "/tree/", times=None)
    with pytest.raises(NetworkError, match=r"the Hub returned .* for org/tiny; do not trust this hub"):
        fetch()


@pytest.mark.parametrize("sha", ["../evil", "main", None, 7])
def test_a_hostile_commit_is_refused(tiny, cache, sha):
    tiny.disturb(faults.edited(lambda facts: facts.update(sha=sha)), "/api/models/org/tiny/revision", times=None)
    with pytest.raises(NetworkError, match="the Hub returned"):
        fetch()


@pytest.mark.parametrize("body", [b"<html>", b"[" * 100_000 + b"]" * 100_000])
def test_invalid_json_is_no_listing(tiny, cache, body):
    tiny.disturb(lambda reply: type(reply).of(200, body, {"Content-Type": "text/html"}), "/tree/")
    with pytest.raises(NetworkError, match="the Hub returned an invalid listing"):
        fetch()


def test_a_unicode_name_is_accepted(hub, cache):
    index = json.dumps({"weight_map": {"a": "modèle 1.safetensors"}}).encode()
    files = model_files(**{"model.safetensors.index.json": index, "modèle 1.safetensors": weights(seed=3)})
    del files["model.safetensors"]
    hub.add("org/tiny", files)
    folder, _ = fetch()
    assert (folder / "modèle 1.safetensors").read_bytes() == weights(seed=3)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/evil.safetensors", "a/evil.safetensors", "evil.bin"])
def test_an_index_that_leads_elsewhere_is_refused(hub, cache, name):
    index = json.dumps({"weight_map": {"a": name}}).encode()
    hub.add("org/tiny", model_files(**{"model.safetensors.index.json": index}))
    with pytest.raises(DamagedModel, match="which is not a safetensors file next to it"):
        fetch()


def test_an_index_that_names_missing_files_is_rejected(hub, cache):
    index = json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}).encode()
    hub.add("org/tiny", model_files(**{"model.safetensors.index.json": index}))
    with pytest.raises(
        UnsupportedModel, match=r"org/tiny lacks model-00001-of-00001.safetensors, a part of its own"
    ):
        fetch()


def test_a_model_without_a_tokenizer_is_refused_before_the_download(hub, cache):
    files = model_files()
    del files["tokenizer.json"]
    hub.add("org/tiny", files)
    with pytest.raises(UnsupportedModel, match=r"org/tiny has no supported tokenizer \("):
        fetch()
    assert not hub.sent(WEIGHTS)


def test_templates_of_another_folder_are_not_those_of_the_model(hub, cache):
    inside, other = "additional_chat_templates/a.jinja", "x/additional_chat_templates/a.jinja"
    hub.add("org/tiny", model_files(**{inside: b"{{ 1 }}", other: b"{{ 2 }}"}))
    folder, _ = fetch()
    assert (folder / inside).read_bytes() == b"{{ 1 }}"
    assert not (folder / other).exists()


def test_pickled_weights_are_refused_before_the_download(hub, cache):
    files = model_files()
    del files["model.safetensors"]
    hub.add("org/tiny", files)
    with pytest.raises(UnsupportedModel, match=r"only pickled weights \(pytorch_model.bin\), which can execute"):
        fetch()
    assert not hub.sent("pytorch_model")


def test_ten_thousand_files_do_not_matter(hub, cache):
    hub.add("org/tiny", model_files() | {f"extra/{i}.txt": b"" for i in range(10_000)})
    folder, _ = fetch()
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == NEEDED


# The disk


def test_too_little_disk_space_is_reported_before_the_download(tiny, cache, monkeypatch):
    usage = pull.shutil.disk_usage(cache.parent)
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda folder: usage._replace(free=pull.SPARE_BYTES + 30_000))
    with pytest.raises(
        DiskFull, match=r"org/tiny needs 40\.\d kB more on the disk with .*, but 67\.1 MB are free; delete files"
    ):
        fetch()
    assert not tiny.sent("cdn")


def test_a_full_disk_does_not_matter_when_complete(tiny, cache, monkeypatch):
    folder, _ = fetch()
    usage = pull.shutil.disk_usage(cache.parent)
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda folder: usage._replace(free=0))
    assert fetch()[0] == folder


def test_a_disk_that_fills_up_keeps_the_downloaded_bytes(tiny, cache, monkeypatch):
    real, came = os.pwrite, []

    def full(file, content, at):
        came.append(len(content))
        if sum(came) > 30_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, content, at)

    monkeypatch.setattr(partial_file.os, "pwrite", full)
    with pytest.raises(
        DiskFull, match=r"the disk with .*models--org--tiny is full; free some space, then run the same"
    ):
        fetch()
    monkeypatch.setattr(partial_file.os, "pwrite", real)
    _, watcher = fetch()
    assert 0 < watcher.order.missing_bytes < len(weights())


def test_an_interrupted_pull_resumes(tiny, cache):
    class Impatient(Watcher):
        def advance(self, file, count):
            super().advance(file, count)
            if self.came > 20_000:
                raise KeyboardInterrupt

    impatient = Impatient()
    with pytest.raises(KeyboardInterrupt):
        fetch(watcher=impatient)
    with pytest.raises(ModelNotFound, match=r"org/tiny (is not on this machine|lacks)"):
        resolve_model("org/tiny")
    folder, watcher = fetch()
    assert (folder / "model.safetensors").read_bytes() == weights()
    assert impatient.came + watcher.came == impatient.order.missing_bytes
    assert not list(cache.rglob(f"*{partial_file.PARTIAL_SUFFIX}"))


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_file_permissions_follow_the_umask(tiny, cache, tmp_path, mask):
    before = os.umask(mask)
    try:
        folder, _ = fetch()
        theirs = snapshot_download("org/tiny", cache_dir=tmp_path / "theirs", endpoint=tiny.url)
    finally:
        os.umask(before)
    assert (folder / WEIGHTS).stat().st_mode == (Path(theirs) / WEIGHTS).stat().st_mode


def test_two_pulls_at_once_fetch_everything_once(tiny, cache):
    tiny.rate = 8_000
    watchers = [Watcher(), Watcher()]
    threads = [threading.Thread(target=fetch, kwargs={"watcher": watcher}) for watcher in watchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(watcher.came for watcher in watchers) == watchers[0].order.missing_bytes
    assert "another process is fetching it" in " ".join(watchers[0].said + watchers[1].said)
    assert resolve_model("org/tiny")


def test_a_damaged_blob_of_the_wrong_size_is_fetched_again(tiny, cache):
    folder, _ = fetch()
    (folder / "model.safetensors").resolve().write_bytes(b"short")
    folder, watcher = fetch()
    assert (folder / "model.safetensors").read_bytes() == weights()
    assert watcher.finished == ["model.safetensors"]


# GGUF


def gguf_files(*names):
    return {name: b"GGUF" + sha256(name.encode()).encode() for name in names}


def test_a_gguf_repository_gives_one_model(hub, cache):
    files = gguf_files(
        "m-Q4_K_M.gguf",
        "m-Q8_0.gguf",
        "mmproj-m-F16.gguf",
        "BF16/m-BF16-00001-of-00002.gguf",
        "BF16/m-BF16-00002-of-00002.gguf",
    )
    hub.add("org/m-GGUF", files | {"README.md": b"", "config.json": b"{}"})
    path, watcher = fetch("org/m-GGUF")
    assert path.name == "m-Q4_K_M.gguf"
    assert set(watcher.finished) == {"m-Q4_K_M.gguf"}  # the README is empty: nothing comes
    path, watcher = fetch("https://huggingface.co/org/m-GGUF:bf16")
    assert set(watcher.finished) == {"BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"}
    assert resolve_model("hf.co/org/m-GGUF:BF16").path == path
    with pytest.raises(ModelNotFound, match="has no model Q2_K; use one of them: :BF16, :Q4_K_M, :Q8_0"):
        fetch("org/m-GGUF:Q2_K")


def test_without_the_usual_quantization_one_must_be_named(hub, cache):
    hub.add("org/m-GGUF", gguf_files("m-Q5_0.gguf", "m-Q8_0.gguf"))
    with pytest.raises(ModelNotFound, match="contains several models; use one of them: :Q5_0, :Q8_0"):
        fetch("org/m-GGUF")


def test_a_missing_part_is_reported_before_the_download(hub, cache):
    hub.add("org/m-GGUF", gguf_files("m-00001-of-00002.gguf"))
    with pytest.raises(
        UnsupportedModel, match=r"org/m-GGUF lacks m-00002-of-00002.gguf, a part of its own weights"
    ):
        fetch("org/m-GGUF")


def test_a_cache_that_cannot_be_written(tiny, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises((LocalLLMError, OSError)):
        fetch()


def test_concurrent_pulls_resolve_a_branch_once(tiny, cache):
    fetch()
    listing, root = fetch_listing(RepoName("org/tiny"), print), cache / "models--org--tiny"
    together = threading.Barrier(8)

    def point(_):
        together.wait()
        pull.update_ref(listing, root)

    for _ in range(50):
        (root / "refs" / "main").unlink()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(point, range(8)))
        assert [ref.name for ref in (root / "refs").iterdir()] == ["main"]
    assert {path.name for path in root.iterdir()} == {"blobs", "refs", "snapshots"}
