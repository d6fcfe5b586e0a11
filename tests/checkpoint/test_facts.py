import json
from pathlib import Path

import pytest

from localllm.checkpoint.facts import Format, gguf_template_names, summarize_model
from localllm.errors import DamagedModel
from localllm.request import SamplingParams
from tests.hub.folders import write_model
from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint


def test_facts_of_a_folder(tmp_path: Path) -> None:
    facts = summarize_model(write_model(tmp_path))
    assert (facts.architecture, facts.context) == ("LlamaForCausalLM", 4096)
    assert facts.layers == (("attention (4 heads, 4 KV heads of 16), MLP of 128", 2),)
    assert (facts.formats, facts.weight_bytes) == ((Format("F16", 1, 24),), 24)
    assert facts.kv_bytes_per_token == 2 * 2 * 4 * 16 * 2  # layers, keys and values, heads, values, bytes
    assert (
        facts.parameters == facts.active_parameters == 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 128) + 64
    )
    assert facts.chat_templates == ("default",)
    assert facts.sampling == SamplingParams(temperature=0.6, top_k=20)


def test_a_quantization_is_named_also_where_it_does_not_run(tmp_path: Path) -> None:
    facts = summarize_model(write_model(tmp_path, quantization_config={"quant_method": "gptq", "bits": 3}))
    assert facts.quantization == "gptq" and "in 3 bits" in str(facts.refused)


def test_layer_types_are_distinguished(tmp_path: Path) -> None:
    kind, changes = FAMILIES["gpt-oss"]
    make_checkpoint(tmp_path, kind, **changes)
    facts = summarize_model(tmp_path)
    experts = "2 of 5 experts of 112"
    assert facts.layers == (
        (f"attention to the last 9 tokens (6 heads, 2 KV heads of 10), {experts}", 2),
        (f"attention (6 heads, 2 KV heads of 10), {experts}", 1),
    )
    assert facts.parameters - facts.active_parameters == 3 * 3 * (3 * 48 * 112 + 2 * 112 + 48)


def test_recurrent_layers_keep_a_state_instead_of_keys_and_values(tmp_path: Path) -> None:
    kind, changes = FAMILIES["LFM2"]
    make_checkpoint(tmp_path, kind, **changes)
    facts = summarize_model(tmp_path)
    kinds = dict(facts.layers)
    convolutions = sum(count for kind, count in kinds.items() if kind.startswith("convolution"))
    attentions = sum(kinds.values()) - convolutions
    assert convolutions and attentions
    config = json.loads((tmp_path / "config.json").read_text())
    size = config["hidden_size"] // config["num_attention_heads"]
    assert facts.kv_bytes_per_token == attentions * 2 * config["num_key_value_heads"] * size * 2
    assert facts.state_bytes == convolutions * (config["conv_L_cache"] - 1) * config["hidden_size"] * 2


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlicense: apache-2.0\ntags:\n- a\n---\nlicense: mit\n", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: gemma-terms\n---\n", "gemma-terms"),
        ("---\nlicense: 'mit'\n---\n", "mit"),
        ("# A model\nlicense: mit\n", None),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\n" + "a" * 10**6, None),
    ],
)
def test_the_licence_is_what_the_model_card_states(tmp_path: Path, card: str, license: str | None) -> None:
    (write_model(tmp_path) / "README.md").write_text(card)
    assert summarize_model(tmp_path).license == license


def test_a_chat_template_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert not summarize_model(tmp_path).chat_templates
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert summarize_model(tmp_path).chat_templates


def test_names_of_chat_templates_in_a_gguf_file() -> None:
    both = {"tokenizer.chat_templates": ["rag", "default"], "tokenizer.chat_template": ""}
    assert gguf_template_names(both, Path("a.gguf")) == ("default", "rag")
    for odd in (5, "rag", [5]):
        with pytest.raises(DamagedModel, match=r"a\.gguf is damaged: tokenizer\.chat_templates is not a list"):
            gguf_template_names({"tokenizer.chat_templates": odd}, Path("a.gguf"))


def test_a_truncated_weights_file_is_named(tmp_path: Path) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DamagedModel, match=r"model\.safetensors is damaged"):
        summarize_model(tmp_path)
