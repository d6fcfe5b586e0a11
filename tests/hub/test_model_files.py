import json

import pytest

from localllm.errors import DamagedModel, UnsupportedModel
from localllm.hub.model_files import missing_files, weight_files
from tests.hub.folders import write_model


def test_missing_files_are_named(tmp_path):
    assert missing_files(tmp_path) == ["config.json", "tokenizer.json", "model.safetensors"]
    assert missing_files(write_model(tmp_path)) == []


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model"])
def test_a_tokenizer_may_have_other_names(tmp_path, name):
    (write_model(tmp_path) / "tokenizer.json").rename(tmp_path / name)
    assert missing_files(tmp_path) == []


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_names_no_files_is_damaged(tmp_path, index):
    (write_model(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DamagedModel, match="names no weight files"):
        missing_files(tmp_path)


def test_an_index_may_list_the_files(tmp_path):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    assert weight_files(tmp_path) == ["part.safetensors"]
    assert missing_files(tmp_path) == []


def test_pickled_weights_are_refused_with_the_reason(tmp_path):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*execute code"):
        missing_files(tmp_path)
