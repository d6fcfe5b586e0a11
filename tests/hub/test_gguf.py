import pytest
from huggingface_hub import constants

from localllm.errors import ModelNotFound
from localllm.hub.gguf import choose_model, models_in_folder
from localllm.hub.hf_cache import cached_models
from localllm.hub.model_files import missing_files
from localllm.hub.resolve import resolve_model
from tests.hub.folders import SNAPSHOT, write_cached, write_model

PARTS = [f"big-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


def test_a_file_is_a_model(tmp_path):
    (tmp_path / "tiny.gguf").touch()
    ref = resolve_model(str(tmp_path / "tiny.gguf"))
    assert (ref.name, ref.path) == ("tiny", tmp_path / "tiny.gguf")
    assert missing_files(ref.path) == []


def test_any_part_is_the_model_and_a_missing_one_is_named(tmp_path):
    for part in PARTS:
        (tmp_path / part).touch()
    assert {resolve_model(str(tmp_path / part)).name for part in PARTS} == {"big"}
    assert resolve_model(str(tmp_path)).path == tmp_path / PARTS[0]
    (tmp_path / PARTS[1]).unlink()
    assert missing_files(tmp_path / PARTS[2]) == [PARTS[1]]
    with pytest.raises(ModelNotFound, match=f"has no {PARTS[1]}"):
        resolve_model(str(tmp_path / PARTS[2]))


def test_a_folder_with_one_model_is_that_model(tmp_path):
    (tmp_path / "tiny.gguf").touch()
    (tmp_path / "mmproj-tiny.gguf").touch()
    assert resolve_model(str(tmp_path)).path == tmp_path / "tiny.gguf"


def test_a_config_beside_it_changes_nothing_unless_there_are_other_weights(tmp_path):
    (write_model(tmp_path) / "tiny.gguf").touch()
    assert resolve_model(str(tmp_path)).path == tmp_path
    (tmp_path / "model.safetensors").unlink()
    assert resolve_model(str(tmp_path)).path == tmp_path / "tiny.gguf"


def test_a_repository_in_the_cache_may_hold_a_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = write_cached(tmp_path, "someone/a-GGUF")
    (folder / "model.safetensors").rename(folder / PARTS[0])
    with pytest.raises(ModelNotFound, match=f"lacks {PARTS[1]}"):
        resolve_model("someone/a-GGUF")
    for part in PARTS:
        (folder / part).touch()
    assert resolve_model("someone/a-GGUF").path == folder / PARTS[0]
    assert resolve_model("someone/a-GGUF").name == "someone/a-GGUF"


def test_a_folder_with_several_models_asks_for_one(tmp_path):
    for name in ("b.gguf", "a.gguf", *PARTS):
        (tmp_path / name).touch()
    assert models_in_folder(tmp_path) == [tmp_path / name for name in ("a.gguf", "b.gguf", PARTS[0])]
    with pytest.raises(ModelNotFound, match=f"several models: a.gguf, b.gguf, {PARTS[0]}; give the path of one"):
        resolve_model(str(tmp_path))


def test_a_file_is_known_by_its_first_bytes_too(tmp_path):
    (tmp_path / "sha256-0a1b").write_bytes(b"GGUF and the rest")
    ref = resolve_model(str(tmp_path / "sha256-0a1b"))
    assert (ref.name, missing_files(ref.path)) == ("sha256-0a1b", [])


def test_a_download_of_a_gguf_repository_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--someone--tiny-GGUF"
    snapshot = root / "snapshots" / SNAPSHOT
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(SNAPSHOT)
    (root / "blobs").mkdir()
    with pytest.raises(ModelNotFound, match="not on this machine"):
        resolve_model("someone/tiny-GGUF")
    (snapshot / "tiny-Q4_0.gguf").write_bytes(b"GGUF")
    assert resolve_model("someone/tiny-GGUF").path == snapshot / "tiny-Q4_0.gguf"
    assert list(cached_models()) == [("someone/tiny-GGUF", snapshot / "tiny-Q4_0.gguf")]
    (snapshot / "tiny-Q8_0.gguf").write_bytes(b"GGUF")
    assert [name for name, _ in cached_models()] == ["someone/tiny-GGUF:Q4_0", "someone/tiny-GGUF:Q8_0"]
    with pytest.raises(ModelNotFound, match="several models; use one of them: :Q4_0, :Q8_0"):
        resolve_model("someone/tiny-GGUF")
    assert resolve_model("someone/tiny-GGUF:q8_0").path == snapshot / "tiny-Q8_0.gguf"
    with pytest.raises(
        ModelNotFound, match="Q6_K is not on this machine; run `localllm pull someone/tiny-GGUF:Q6_K`"
    ):
        resolve_model("someone/tiny-GGUF:Q6_K")


@pytest.mark.parametrize(
    ("present", "asked"), [("UD-Q4_K_M", "Q4_K_M"), ("Q4_K_M", "UD-Q4_K_M"), ("UD-Q4_K_M", None)]
)
def test_a_missing_format_falls_back_to_its_twin(tmp_path, present, asked):
    files = [tmp_path / f"x-{quant}.gguf" for quant in (present, "Q8_0")]
    assert choose_model(files, asked, "org/x") == files[0]
    with pytest.raises(ModelNotFound, match="has no model Q5_K_M"):
        choose_model(files, "Q5_K_M", "org/x")
    both = [tmp_path / f"x-{quant}.gguf" for quant in ("UD-Q4_K_M", "Q4_K_M")]
    assert choose_model(both, "Q4_K_M", "org/x") == both[1]
