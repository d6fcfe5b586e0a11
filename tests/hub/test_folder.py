import json

import pytest

from localllm.errors import DamagedModel
from localllm.hub.folder import describe, missing_files, read_json
from tests.hub.folders import write_model


def test_a_folder_says_what_its_files_say(tmp_path):
    facts = describe(write_model(tmp_path))
    assert (facts.architecture, facts.layers, facts.context) == ("LlamaForCausalLM", 2, 4096)
    assert (facts.parameters, facts.dtypes) == (12, ("F16",))
    assert facts.weight_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert facts.chat_template
    assert facts.generation_config == {"temperature": 0.6, "top_k": 20}


def test_packed_weights_are_not_counted_as_parameters(tmp_path):
    facts = describe(write_model(tmp_path, quantization_config={"quant_method": "int8"}))
    assert (facts.parameters, facts.quantization) == (None, "int8")


def test_a_chat_template_may_have_a_file_of_its_own(tmp_path):
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert not describe(tmp_path).chat_template
    (tmp_path / "chat_template.jinja").touch()
    assert describe(tmp_path).chat_template


def test_missing_files_are_named(tmp_path):
    assert missing_files(tmp_path) == ["config.json", "tokenizer.json", "model.safetensors"]
    assert missing_files(write_model(tmp_path)) == []


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_names_no_files_is_damaged(tmp_path, index):
    (write_model(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DamagedModel, match="names no weight files"):
        missing_files(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", '"text"', "\udcff"])
def test_a_damaged_json_file_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DamagedModel, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_a_truncated_weights_file_is_named(tmp_path):
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DamagedModel, match=r"model\.safetensors is no whole safetensors file"):
        describe(tmp_path)


def test_an_index_may_list_the_files(tmp_path):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "part.safetensors"}})
    )
    assert missing_files(tmp_path) == []
