import pytest
from huggingface_hub import constants

from localllm.errors import ModelNotFound, UnsupportedModel
from localllm.hub.catalog import PACKAGE_FOLDER, bundled_folder, catalog
from localllm.hub.local_names import set_alias
from localllm.hub.model_files import missing_files
from localllm.hub.names import RepoName, is_path, parse_name
from localllm.hub.resolve import resolve_model
from tests.hub.folders import write_cached, write_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache, and an empty working directory."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache"


def test_a_folder_is_named_by_its_last_part(tmp_path):
    folder = write_model(tmp_path / "here" / "my-model")
    for name in (str(folder), "./my-model", "my-model", "my-model/"):
        ref = resolve_model(name)
        assert ref.name == "my-model"
        assert ref.path.resolve() == folder


def test_a_link_to_a_folder_is_named_as_it_was_given(tmp_path, monkeypatch):
    write_model(tmp_path / "folder")
    (tmp_path / "mine").symlink_to(tmp_path / "folder")
    assert resolve_model(str(tmp_path / "mine")).name == "mine"
    monkeypatch.chdir(tmp_path / "folder")
    assert (resolve_model(".").name, resolve_model("../folder/../mine").name) == ("folder", "mine")


def test_an_alias_of_a_path_is_the_name_of_the_model(tmp_path, home):
    set_alias("mine", str(write_model(tmp_path / "folder")))
    assert (resolve_model("mine").name, resolve_model("mine", paths=False).name) == ("mine", "mine")
    assert resolve_model("mine").path == tmp_path / "folder"


def test_an_alias_finds_its_repository_in_the_cache(cache):
    folder = write_cached(cache, "Qwen/Qwen3-4B")
    assert resolve_model("qwen3:4b-bf16").path == folder
    assert resolve_model("qwen3:4b-bf16").name == "qwen3:4b-bf16"
    assert resolve_model("Qwen3:4b-FP16").name == "qwen3:4b-bf16"
    assert resolve_model("Qwen/Qwen3-4B").path == folder
    assert resolve_model("Qwen/Qwen3-4B").name == "Qwen/Qwen3-4B"


def test_second_names_and_editions_of_the_catalog_mean_a_repository_and_a_file_of_it(cache):
    assert parse_name("qwen3:8b-bf16") == RepoName("Qwen/Qwen3-8B")
    edition = RepoName("Qwen/Qwen3-8B-GGUF", quant="Q4_K_M")
    assert parse_name("qwen3") == parse_name("qwen3:8b") == edition
    assert parse_name("qwen3:8b-int4") == parse_name("qwen3:8b-q4_k_m") == edition
    folder = write_cached(cache, "Qwen/Qwen3-8B-GGUF")
    for quant in ("Q4_K_M", "Q8_0"):
        (folder / f"Qwen3-8B-{quant}.gguf").write_bytes(b"GGUF")
    assert resolve_model("qwen3:8b-int4").path == folder / "Qwen3-8B-Q4_K_M.gguf"


def test_a_repository_outside_the_catalog_needs_no_alias(cache):
    folder = write_cached(cache, "someone/their-model")
    assert resolve_model("someone/their-model").path == folder


@pytest.mark.parametrize("name", ["qwen3:4b", "Qwen/Qwen3-4B"])
def test_a_missing_model_says_how_to_pull_it(name):
    with pytest.raises(ModelNotFound, match=f"{name} is not on this machine; run `localllm pull {name}`") as error:
        resolve_model(name)
    assert error.value.exit_code == 8


def test_a_partial_download_names_the_missing_files(cache):
    folder = write_cached(cache, "Qwen/Qwen3-4B")
    (folder / "model.safetensors").unlink()
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ModelNotFound, match=r"lacks model-00002-of-00002\.safetensors"):
        resolve_model("qwen3:4b-bf16")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("quen3:4b", "qwen3:4b"),
        ("lama3.2", "llama3.2"),
        ("Demoo", "demo"),
    ],
)
def test_a_slip_of_the_pen_gets_near_names(name, near):
    with pytest.raises(ModelNotFound, match=f"no model is called {name}; did you mean .*{near}"):
        resolve_model(name)


def test_a_name_in_another_case_is_the_one_of_the_catalog(cache):
    assert resolve_model("Demo").name == "demo"
    with pytest.raises(ModelNotFound, match=r"Qwen3:0\.6B is not on this machine"):
        resolve_model("Qwen3:0.6B")


@pytest.mark.parametrize(
    ("address", "repo"),
    [
        ("org/x", RepoName("org/x")),
        ("org/x/", RepoName("org/x")),
        ("org/x?library=transformers#files", RepoName("org/x")),
        ("org/x:Q8_0", RepoName("org/x", quant="Q8_0")),
        ("org/x/tree/main", RepoName("org/x")),
        ("org/x/tree/v1.0/", RepoName("org/x", "v1.0")),
        ("org/x/tree/refs%2Fpr%2F3", RepoName("org/x", "refs/pr/3")),
        ("org/x/blob/main/model.safetensors", RepoName("org/x")),
        ("org/x/blob/main/x-Q4_0.gguf", RepoName("org/x", quant="x-Q4_0.gguf")),
        ("org/x/resolve/v1/Q4_0/x.gguf?download=true", RepoName("org/x", "v1", "Q4_0/x.gguf")),
    ],
)
def test_a_hub_url_names_its_repository(address, repo):
    for host in ("https://huggingface.co", "hf.co", "http://www.huggingface.co"):
        assert parse_name(f"{host}/{address}") == repo


@pytest.mark.parametrize(
    "address",
    ["org", "org/x/discussions/3", "org/x/tree/main/folder", "org/x/tree/..", "org/x/blob/main/..%2Fx.gguf"],
)
def test_an_address_of_something_else_is_refused(address):
    with pytest.raises(ModelNotFound, match="is not a model name"):
        parse_name(f"https://huggingface.co/{address}")


@pytest.mark.parametrize("name", ["", "foo bar", "a:b:c", "-x", "x\n", "\0", "ü", "a" * 5000])
def test_invalid_names_are_rejected(name):
    with pytest.raises(ModelNotFound, match="is not a model name"):
        resolve_model(name)


@pytest.mark.parametrize(
    "name", ["org/a--b", "org/a.git", "a..b/c", "org/x-", "org/x.", "org./x", "org/x@v..1", "org/x@", "org/x:"]
)
def test_names_impossible_on_the_hub_are_rejected(name):
    with pytest.raises(ModelNotFound, match="is not a model name"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["./demo", "/nowhere/demo", "a/b/c", "~/nowhere-at-all", "../demo", "demo/"])
def test_a_path_never_falls_through_to_an_alias(name):
    with pytest.raises(ModelNotFound, match="there is no folder"):
        resolve_model(name)


def test_a_name_of_the_catalog_is_never_a_path(tmp_path):
    (tmp_path / "here" / "demo").mkdir()
    assert not is_path("demo")
    assert is_path("./demo")


@pytest.mark.parametrize("file", ["model.safetensors", "notes.txt"])
def test_a_single_file_is_rejected_with_the_alternative(tmp_path, file):
    (tmp_path / "here" / file).touch()
    with pytest.raises(UnsupportedModel, match="folder"):
        resolve_model(f"./{file}")


def test_a_broken_repository_in_the_cache_does_not_hide_the_near_names(cache):
    (write_cached(cache, "some/broken") / "config.json").write_text("{")
    with pytest.raises(ModelNotFound, match="did you mean qwen3"):
        resolve_model("quen3")


@pytest.mark.skipif(
    not (PACKAGE_FOLDER / "boxed" / "demo").exists(), reason="the boxed model is not in this tree yet"
)
def test_the_bundled_model_is_complete():
    folder = bundled_folder(catalog()["demo"])
    assert missing_files(folder) == []
    assert resolve_model("demo").path == folder
