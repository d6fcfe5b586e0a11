"""A damaged or hostile model folder causes a one-sentence error that names the fault, and the documented exit
code.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.errors import DamagedModel, LocalLLMError, ModelNotFound, UnsupportedModel
from localllm.hub.catalog import PACKAGE_FOLDER
from tests.tiny import make_checkpoint, make_engine

Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "Llama", num_hidden_layers=1)
    return tmp_path


def edit_tensors(folder: Path, edit: Callable[[Weights], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def error_of(folder: Path) -> LocalLLMError:
    with pytest.raises(LocalLLMError) as caught:
        make_engine(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    return caught.value


NORM = "model.layers.0.input_layernorm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_a_missing_tensor_is_named_with_its_shape(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop(QUERY))
    assert (
        "lacks the tensor 'layers.0.self_attn.q_proj.weight' (the runtime's name) of shape [60, 48]"
        in error_of(folder).message
    )


def test_an_extra_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.surprise.weight": torch.ones(2)}))
    assert "model.surprise.weight" in error_of(folder).message


def test_a_wrong_shape_is_reported_with_both(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({QUERY: t[QUERY].T.contiguous()}))
    message = error_of(folder).message
    assert QUERY in message and "[48, 60]" in message and "[60, 48]" in message


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_a_number_is_detected(folder: Path, value: float) -> None:
    edit_tensors(folder, lambda t: t[NORM].__setitem__(3, value))
    error = error_of(folder)
    assert f"{NORM!r} is NaN or infinite in 1 of 48 elements" in error.message
    assert error.exit_code == 7


def test_large_finite_weights_are_no_fault(folder: Path) -> None:
    edit_tensors(folder, lambda t: t[NORM].fill_(3e38))
    make_engine(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000, -1])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    error = error_of(folder)
    assert isinstance(error, DamagedModel)
    assert "model.safetensors is damaged" in error.message


def rewrite_header(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    edited = edit(header)
    raw = edited if isinstance(edited, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: h[NORM].update(shape=[10**18, 10**18]),
        lambda h: h[NORM].update(shape=[-48]),
        lambda h: h[NORM].update(shape=["48"]),
        lambda h: h[NORM].update(data_offsets=[0, 192]),
        lambda h: h[NORM].update(data_offsets=["0", "192"]),
        lambda h: h[NORM].update(data_offsets=None),
        lambda h: h[NORM].update(dtype=["F32"]),
        lambda h: h[NORM].update(data_offsets=[2**70, 2**70 + 192]),
        lambda h: h[NORM].pop("dtype"),
        lambda h: h.update({NORM: 5}),
        lambda h: b"[1, 2]",
        lambda h: b"{not json",
        lambda h: b"[" * 50_000,
        lambda h: json.dumps(h).encode()[:-1] + b', "a": {"dtype":"F32"}, "a": {}}',
    ],
    ids=range(14),
)
def test_a_hostile_header(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    rewrite_header(folder, edit)
    assert isinstance(error_of(folder), DamagedModel)


@pytest.mark.parametrize("shape", [[0, 2, 2], [10_000, 0, 2]])
def test_experts_of_size_zero(folder: Path, shape: list[int]) -> None:
    empty = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    rewrite_header(folder, lambda h: h.update({"model.layers.0.mlp.experts.down_proj": empty}))
    assert "is not a stack of experts" in error_of(folder).message


def test_more_experts_than_any_model_has(folder: Path) -> None:
    one = torch.zeros(10_000, 1, dtype=torch.uint8)
    stacks = {f"model.layers.{i}.mlp.experts.down_proj": one.clone() for i in range(27)}
    save_file(stacks, folder / "model.safetensors")
    assert "more than 262144 tensors" in error_of(folder).message


def test_a_pointer_of_git_lfs_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in error_of(folder).message


def test_a_header_longer_than_the_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "the file has 10" in error_of(folder).message


@pytest.mark.parametrize("dtype", ["I32", "F4"])
def test_a_dtype_that_does_not_run(folder: Path, dtype: str) -> None:
    rewrite_header(folder, lambda h: h[NORM].update(dtype=dtype))
    assert isinstance(error_of(folder), UnsupportedModel)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_reason(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    error = error_of(folder)
    assert isinstance(error, UnsupportedModel)
    assert name in error.message and "execute code" in error.message


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"contains no config\.json"):
        read_header(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin"])
def test_an_index_names_only_files_beside_it(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: name}}))
    assert "not a safetensors file next to it" in error_of(folder).message


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: "a.safetensors"}}))
    assert "contains no a.safetensors" in error_of(folder).message


def test_a_tensor_in_two_shards_is_an_error(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({NORM: tensors[NORM]}, folder / "more.safetensors")
    index = {"weight_map": {QUERY: "model.safetensors", NORM: "more.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{NORM!r} is stored twice" in error_of(folder).message


def test_shards_are_read_as_one(folder: Path) -> None:
    expected = make_engine(folder).logits([3, 4, 5])
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(make_engine(folder).logits([3, 4, 5]), expected)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, UnsupportedModel, "'MambaForCausalLM' is not supported"),
        ({"architectures": ...}, UnsupportedModel, "not supported"),
        ({"hidden_act": "relu"}, UnsupportedModel, "relu"),
        ({"hidden_size": ...}, DamagedModel, "lacks hidden_size"),
        ({"hidden_size": "48"}, DamagedModel, "not a positive whole number"),
        ({"num_hidden_layers": 0}, DamagedModel, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, DamagedModel, "1000000000 layers"),
        ({"num_attention_heads": 0}, DamagedModel, "num_attention_heads"),
        ({"architectures": 5}, DamagedModel, "architectures"),
        ({"architectures": [[]]}, DamagedModel, "architectures"),
        ({"rms_norm_eps": "1"}, DamagedModel, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, DamagedModel, "rms_norm_eps"),
        ({"eos_token_id": "x"}, DamagedModel, "eos_token_id"),
        ({"tie_word_embeddings": "no"}, DamagedModel, "tie_word_embeddings"),
        ({"rope_parameters": {"rope_theta": 0}}, DamagedModel, "rope_theta"),
        ({"rope_parameters": []}, DamagedModel, "rope_parameters"),
        ({"num_key_value_heads": 4}, DamagedModel, "cannot share"),
        ({"head_dim": 5}, DamagedModel, "rotated in pairs"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10.0}}, UnsupportedModel, "dynamic"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 10.0}}, DamagedModel, "lacks factor"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_run(
    folder: Path, changes: dict[str, Any], kind: type[LocalLLMError], words: str
) -> None:
    edit_config(folder, **changes)
    error = error_of(folder)
    assert isinstance(error, kind)
    assert words in error.message


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"a": 1, "a": 2}', b"[" * 10**5])
def test_a_config_that_is_no_json_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert isinstance(error_of(folder), DamagedModel)


@pytest.mark.parametrize(
    "layout",
    [{"quant_method": "gptq", "bits": 3}, {"quant_method": "compressed-tensors", "format": "pack-quantized"}],
)
def test_a_quantization_that_does_not_run_is_named(folder: Path, layout: dict[str, Any]) -> None:
    edit_config(folder, quantization_config=layout)
    error = error_of(folder)
    assert isinstance(error, UnsupportedModel)
    assert layout["quant_method"] in error.message


@pytest.mark.parametrize(
    "layout", ["gptq", [], {"quant_method": 5}, {"config_groups": [1]}, {"config_groups": {"a": 1}}]
)
def test_an_invalid_quantization(folder: Path, layout: object) -> None:
    edit_config(folder, quantization_config=layout)
    assert isinstance(error_of(folder), DamagedModel)


@pytest.mark.parametrize("name", [NORM, QUERY, "model.embed_tokens.weight"])
def test_integers_are_no_weights_without_a_scale(folder: Path, name: str) -> None:
    edit_tensors(folder, lambda t: t.update({name: t[name].to(torch.int8)}))
    error = error_of(folder)
    assert isinstance(error, UnsupportedModel)
    assert name in error.message


def test_a_weight_too_large_for_the_dtype_it_runs_in(folder: Path) -> None:
    edit_tensors(folder, lambda t: t[QUERY].fill_(1e6))
    make_engine(folder)
    with pytest.raises(DamagedModel, match=r"infinite in 2880 of 2880 elements in float16.*--dtype float32"):
        make_engine(folder, torch.float16)


def test_a_name_cannot_write_to_the_terminal(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"x\n\x1b[31mred": torch.ones(2)}))
    message = str(error_of(folder))
    assert "\x1b" not in message and r"\x1b[31mred" in message


def test_a_tied_head_that_is_stored_twice_and_old_rope_tables_are_no_leftovers(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}))
    make_engine(folder)
    assert parse_config(read_header(folder).config).tie_embeddings


def tensors_of(header):
    try:
        return {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    except (ValueError, AttributeError):
        return None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["float", "quantized"])
def test_a_flipped_bit_in_a_header_is_reported_as_damage(tmp_path, kind, seed):
    folder = tmp_path / "model"
    if kind == "quantized":
        shutil.copytree(PACKAGE_FOLDER / "boxed" / "demo", folder)
    else:
        make_checkpoint(folder, "Llama", num_hidden_layers=1)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    rng = random.Random(seed)
    for _ in range(5):
        changed = bytearray(content)
        changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
        if tensors_of(changed[8:end]) == tensors_of(content[8:end]) and changed[:8] == content[:8]:
            continue  # of the notes beside the tensors, which nobody reads
        file.write_bytes(changed)
        with pytest.raises(DamagedModel):
            make_engine(folder)
