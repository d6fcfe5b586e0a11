"""GGUF files run packed, with the logits of their dequantized weights."""

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import localllm
from bench import gguf_checkpoint
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.checkpoint.tensors import Weights
from localllm.errors import DamagedModel, LocalLLMError, UnsupportedModel
from localllm.plan.weights import weight_bytes
from localllm.quant.formats.gguf import dequantize_rows
from localllm.quant.tensor import QuantizedTensor
from localllm.request import SamplingParams
from tests.gguf_writer import Kind, write_gguf
from tests.models.families import FAMILIES, OTHERWISE_IN_GGUF
from tests.models.proofs import difference, token_ids
from tests.shared import shared
from tests.tiny import make_checkpoint, make_engine

FILES = (
    *("f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k"),
    *("iq4_nl", "iq4_xs"),
)
NAMES = {  # of a Llama's tensors: GGUF, transformers
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LARGE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "moe_intermediate_size": 64}
LARGE_LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4}


def reference(file: Path) -> Any:
    """The Llama of a GGUF file in `transformers`, its weights dequantized by the `gguf` package."""
    reader = gguf.GGUFReader(file)
    key = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    config = transformers.LlamaConfig(
        vocab_size=key["vocab_size"],
        hidden_size=key["embedding_length"],
        intermediate_size=key["feed_forward_length"],
        num_hidden_layers=key["block_count"],
        num_attention_heads=key["attention.head_count"],
        num_key_value_heads=key["attention.head_count_kv"],
        rms_norm_eps=key["attention.layer_norm_rms_epsilon"],
    )
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        *block, role, _ = tensor.name.split(".")
        if role in ("attn_q", "attn_k"):  # pairs side by side -> half a head apart
            heads = config.num_attention_heads if role == "attn_q" else config.num_key_value_heads
            values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        layer = f"model.layers.{block[1]}." if block else ""
        weights[f"{layer}{NAMES[role]}.weight"] = values
    model = transformers.LlamaForCausalLM(config).eval()
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights)
    return model


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_the_dequantized_weights(name: str) -> None:
    file = shared(f"gguf/model-{name}.gguf")
    recorded = np.load(shared("gguf/llamacpp-logits.npz"))
    ids = recorded["ids"].tolist()
    got = make_engine(file).logits(ids)
    assert difference(got, reference(file)(torch.tensor([ids])).logits[0]) < 1e-3
    if not name.startswith(("q2", "q3")):
        # llama.cpp rounds what it multiplies to 8 bits, so that it is no exact oracle.
        assert np.corrcoef(got.ravel(), recorded[name.upper()].ravel())[0, 1] > 0.995


def test_a_trained_model_gives_the_logits_of_its_other_edition() -> None:
    ids = token_ids(60)
    gguf_logits = make_engine(shared("stories260K-f32.gguf")).logits(ids)
    torch.testing.assert_close(gguf_logits, make_engine(shared("stories260K")).logits(ids), atol=1e-5, rtol=0)


def test_weights_stay_packed() -> None:
    file = shared("gguf/model-q4_k_m.gguf")
    engine = make_engine(file)
    model = engine.runner.model
    held = [w for layer in model.layers for w in (*layer.mixer.qkv.weights, *layer.ffn.down.weights)]
    held += model.lm_head.weights
    assert all(isinstance(weight, QuantizedTensor) for weight in held)
    assert {weight.format for weight in held} == {"int4_lanes", "int6_lanes"}
    assert model.embedding.weight.format in ("q4_k", "q6_k")
    header = read_header(file)
    planned = weight_bytes(header, parse_config(header.config), "float32", "cpu").total
    assert (
        header.stored_bytes < planned < 0.7 * 2.62e6
    )  # bytes for 2.62 million parameters; lanes have Q6_K in 8 bits


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """A family as GGUF in a format, and as the dequantized values of its blocks."""

    def make(family: str, kind: Kind, **sizes: int) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("packed")
        name, changes = FAMILIES[family]
        make_checkpoint(folder, name, **{**changes, **OTHERWISE_IN_GGUF.get(family, {}), **LARGE, **sizes})
        write_gguf(folder, folder / "packed.gguf", kind)
        write_gguf(folder, folder / "plain.gguf", kind, dequantized=True)
        return folder / "packed.gguf", folder / "plain.gguf"

    return make


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["Llama, tied", "Qwen3-MoE", "Gemma 2", "Phi-3", "Llama, biases"])
def test_packed_weights_give_the_logits_of_dequantized_weights(packed: Any, family: str, kind: Kind) -> None:
    compact, plain = packed(family, kind)
    ids = token_ids(40)
    assert compact.stat().st_size < plain.stat().st_size * 0.7
    assert difference(make_engine(compact).logits(ids), make_engine(plain).logits(ids)) < 1e-4


@pytest.mark.parametrize(
    ("family", "sizes", "tensor"),
    [
        ("DeepSeek-V2-Lite", LARGE_LATENT, "layers.1.self_attn.k_b_proj.weight"),
        ("Gemma 4, like E2B", {"hidden_size_per_layer_input": 32}, "embed_tokens_per_layer.weight"),
    ],
)
def test_packed_latents_and_tables_give_the_logits_of_dequantized_ones(
    packed: Any, family: str, sizes: dict[str, int], tensor: str
) -> None:
    compact, plain = packed(family, Kind.Q8_0, **sizes)
    ids = token_ids(40)
    assert read_header(compact).tensors[tensor].dtype == "Q8_0"
    assert difference(make_engine(compact).logits(ids), make_engine(plain).logits(ids)) < 1e-4


def test_experts_in_mxfp4(packed: Any) -> None:
    compact, plain = packed("gpt-oss", Kind.MXFP4)
    ids = token_ids(40)
    assert "MXFP4_GGUF" in {tensor.dtype for tensor in read_header(compact).tensors.values()}
    assert difference(make_engine(compact).logits(ids), make_engine(plain).logits(ids)) < 1e-4


def test_a_scale_of_mxfp4_that_is_not_a_number_is_detected(packed: Any) -> None:
    file, _ = packed("gpt-oss", Kind.MXFP4)
    tensor = read_header(file).tensors["layers.1.mlp.experts.3.down_proj.weight"]
    content = bytearray(file.read_bytes())
    content[tensor.offset + 17] = 0xFF  # of the second block
    file.write_bytes(content)
    with pytest.raises(DamagedModel, match=r"'blk\.1\.ffn_down_exps\.weight' has a scale that is NaN"):
        make_engine(file)


def test_bfloat16_is_as_near_with_blocks_as_with_plain_weights(packed: Any) -> None:
    compact, plain = packed("Llama, tied", Kind.Q8_0)
    exact = make_engine(plain).logits(token_ids(40))
    got, rounded = (make_engine(file, torch.bfloat16).logits(token_ids(40)) for file in (compact, plain))
    assert difference(got.float(), exact) < 1.2 * difference(rounded.float(), exact)


# --- files that leave out what they may, or what they must not ---


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "Llama", head_dim=8, num_key_value_heads=6)
    return tmp_path


def rewritten(folder: Path, **edit: Any) -> Path:
    file = folder / "model.gguf"
    write_gguf(folder, file, **edit)
    return file


OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.freq_base", "rope.dimension_count")


def test_keys_that_may_be_missing_have_defaults(llama: Path) -> None:
    expected = make_engine(rewritten(llama)).logits([5, 6, 7])
    assert torch.equal(make_engine(rewritten(llama, without=OPTIONAL)).logits([5, 6, 7]), expected)
    assert read_header(llama / "model.gguf").config["rope_parameters"] == {"rope_theta": 10000.0}


@pytest.mark.parametrize(
    "key", ["embedding_length", "block_count", "attention.head_count", "feed_forward_length", "context_length"]
)
def test_a_missing_key_is_named(llama: Path, key: str) -> None:
    with pytest.raises(DamagedModel, match=rf"lacks the key llama\.{key}"):
        read_header(rewritten(llama, without=(key,)))


@pytest.mark.parametrize(
    ("key", "value", "kind", "words"),
    [
        ("general.architecture", "t5", UnsupportedModel, "'t5' is not supported"),
        ("llama.block_count", 0, DamagedModel, "block_count"),
        ("llama.block_count", 4_000_000_000, DamagedModel, "block_count"),
        ("llama.block_count", 50_000, DamagedModel, "50000 layers"),
        ("llama.attention.head_count", "six", DamagedModel, "head_count"),
        ("llama.rope.freq_base", -1.0, DamagedModel, "freq_base"),
        ("llama.rope.scaling.type", "dynamic", UnsupportedModel, "'dynamic' is not supported"),
        ("llama.rope.dimension_count", 4, UnsupportedModel, "partial rotary embeddings"),
        ("llama.embedding_length", 64, DamagedModel, "shape"),
    ],
)
def test_an_invalid_key(llama: Path, key: str, value: Any, kind: type[LocalLLMError], words: str) -> None:
    with pytest.raises(kind, match=words):
        make_engine(rewritten(llama, changed={key: value}))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rope_freqs.weight", torch.tensor([1.0, 1.0, 2.0, *[1e30] * 5]), "other rotary embeddings"),
        ("gemma4.rope.dimension_count_swa", 4, "other rotary embeddings"),
        ("gemma4.attention.head_count_kv", [2, 1, 1, 2, 2, 1], "differ in key-value heads"),
    ],
)
def test_an_unpublished_gemma_4_variant_is_refused(tmp_path: Path, key: str, value: Any, words: str) -> None:
    kind, changes = FAMILIES["Gemma 4, like 31B"]
    make_checkpoint(tmp_path, kind, **changes)
    with pytest.raises(UnsupportedModel, match=words):
        make_engine(rewritten(tmp_path, changed={key: value}))


def test_more_heads_than_values_are_no_heads(llama: Path) -> None:
    more = {"llama.attention.head_count": 100}
    with pytest.raises(DamagedModel, match="100 heads in 48 dimensions"):
        make_engine(rewritten(llama, without=("attention.key_length",), changed=more))


def test_a_vocabulary_alone_cannot_be_run() -> None:
    with pytest.raises(UnsupportedModel, match="a vocabulary but no weights"):
        read_header(shared("llama3.2-bpe/vocab.gguf"))


def test_a_missing_tensor_is_named_as_the_file_names_it(llama: Path) -> None:
    with pytest.raises(DamagedModel, match=r"layers\.1\.mlp\.down_proj\.weight"):
        make_engine(rewritten(llama, without=("blk.1.ffn_down.weight",)))


def test_an_unknown_tensor_is_named(llama: Path) -> None:
    with pytest.raises(DamagedModel, match=r"'blk\.0\.surprise\.weight'"):
        make_engine(rewritten(llama, changed={"blk.0.surprise.weight": torch.ones(4)}))


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj", "embed_tokens"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1], ids=lambda kind: kind.name)
def test_a_weight_that_is_not_a_number_is_detected(tmp_path: Path, kind: Kind, name: str) -> None:
    make_checkpoint(tmp_path, "Llama", **LARGE | {"tie_word_embeddings": True})
    file = rewritten(tmp_path, kind=kind)
    tensor = read_header(file).tensors[f"{name}.weight"]
    content = bytearray(file.read_bytes())
    content[tensor.offset : tensor.offset + 4] = b"\xff\xff\xff\xff"
    file.write_bytes(content)
    with pytest.raises(DamagedModel, match=f"'{tensor.name}' is NaN or infinite in "):
        make_engine(file)


def test_a_model_in_parts_runs(llama: Path) -> None:
    expected = make_engine(rewritten(llama)).logits([5, 6, 7])
    (llama / "model.gguf").unlink()
    write_gguf(llama, llama / "model.gguf", tensors_per_file=10)
    parts = sorted(llama.glob("*.gguf"))
    assert len(parts) > 2
    assert torch.equal(make_engine(parts[1]).logits([5, 6, 7]), expected)


def test_recommended_sampling_is_read(llama: Path) -> None:
    file = rewritten(llama, changed={"general.sampling.temp": 0.7, "general.sampling.top_k": 20})
    found = json.loads(json.dumps(read_header(file).generation_config))
    assert found == {"do_sample": True, "temperature": pytest.approx(0.7), "top_k": 20}


# --- from the file to the text ---

STORY = (
    " Lily. She loved to play outside in the park. One day, she saw a big, red ball. She wanted to play with it, "
    "but it was too high.\nLily's mom said, \"Lily, let's go to the park.\" Lily was sad and did"
)


def test_a_file_gives_the_text_of_llama_cpp() -> None:
    file = shared("stories260K-f32.gguf")
    with localllm.load(file) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=80)
        story = llm.generate("Once upon a time, there was a little girl named", params)
        assert story.text.startswith(STORY)
        assert (llm.name, llm.dtype) == ("stories260K-f32", "float32")
        assert llm.weight_bytes == read_header(file).stored_bytes


def test_a_packed_file_holds_no_more_memory_than_it_has_bytes() -> None:
    with localllm.load(shared("gguf/model-q4_k_m.gguf")) as llm:
        assert llm.weight_bytes < 1.75e6
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=3)).token_ids


def test_a_closed_model_lets_go_of_its_file_and_its_memory(tmp_path: Path) -> None:
    file = Path(shutil.copy(shared("gguf/model-q4_k_m.gguf"), tmp_path))
    llm = localllm.load(file)
    assert llm.generate([1, 2, 3], SamplingParams(max_tokens=3)).token_ids
    model = weakref.ref(llm.worker.engine.runner.model)
    assert str(file) in Path("/proc/self/maps").read_text()
    llm.close()
    assert model() is None
    assert str(file) not in Path("/proc/self/maps").read_text()
    with pytest.raises(LocalLLMError, match="closed"):
        llm.logits([1, 2])


def test_a_tied_embedding_is_read_from_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"vocab_size": 333, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    for key, number in (shape | {"num_attention_heads": 4, "num_key_value_heads": 2}).items():
        monkeypatch.setitem(gguf_checkpoint.SHAPE, key, number)
    gguf_checkpoint.make(tmp_path / "model.gguf", "Q4_K_M")
    model, header = make_engine(tmp_path / "model.gguf").runner.model, read_header(tmp_path / "model.gguf")
    assert model.embedding.weight is model.lm_head.weights[0]
    stored = Weights(header).take("embed_tokens.weight", (333, 256), ("Q6_K",))
    ids = torch.tensor([332, 0, 16, 16])
    assert torch.equal(model.embedding(ids), dequantize_rows(stored[ids], "q6_k", model.embedding.dtype))
