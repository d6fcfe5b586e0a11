from pathlib import Path

import pytest

from localllm.checkpoint.facts import read_facts
from localllm.errors import DamagedModel
from localllm.request import SamplingParams
from tests.hub.folders import write_model


def test_a_folder_says_what_its_files_say(tmp_path: Path) -> None:
    facts = read_facts(write_model(tmp_path))
    assert (facts.architecture, facts.layers, facts.context) == ("LlamaForCausalLM", 2, 4096)
    assert (facts.parameters, facts.dtypes, facts.weight_bytes) == (12, ("F16",), 24)
    assert facts.chat_template
    assert facts.sampling == SamplingParams(temperature=0.6, top_k=20)


def test_packed_weights_are_not_counted_as_parameters(tmp_path: Path) -> None:
    facts = read_facts(write_model(tmp_path, quantization_config={"quant_method": "gptq"}))
    assert (facts.parameters, facts.quantization) == (None, "gptq")


def test_a_chat_template_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert not read_facts(tmp_path).chat_template
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert read_facts(tmp_path).chat_template


def test_a_truncated_weights_file_is_named(tmp_path: Path) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DamagedModel, match=r"model\.safetensors is damaged"):
        read_facts(tmp_path)
