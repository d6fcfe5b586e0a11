"""An artefact has the layout of compressed-tensors, and is either complete or absent."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from localllm.checkpoint.header import Header, read_header, read_safetensors_header
from localllm.errors import DiskFull, UsageError
from localllm.quant import packing
from localllm.quant.dequantize import dequantize
from localllm.quant.formats.groups import pack_int4
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize import states
from localllm.quantize.artefact import Artefact
from localllm.quantize.check import check_group_size
from localllm.quantize.compressed import choose_scheme, quantization_config, to_stored_tensors
from localllm.quantize.quantizer import quantize_layers
from localllm.quantize.source import Recipe
from tests.quantize.rounding import quantized_parts, write_rounded
from tests.shared import shared
from tests.tiny import make_checkpoint, make_engine

IDS = list(range(3, 40))
INT4 = Recipe("rtn", 4, 32)
RECIPES = {
    "INT4, groups of 32": INT4,
    "INT4, zero points": Recipe("rtn", 4, 64, symmetric=False),
    "INT4, whole rows": Recipe("rtn", 4, None),
    "INT8, whole rows": Recipe("rtn", 8, None),
    "INT8, groups of 64": Recipe("rtn", 8, 64),
}


def make_model(folder: Path, kind: str = "Llama", **changes: Any) -> tuple[Header, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    model = make_checkpoint(folder, kind, **sizes | changes)
    return read_header(folder), model


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_dequantized_weights(recipe: Recipe, tied: bool, tmp_path: Path) -> None:
    header, model = make_model(tmp_path / "model", tie_word_embeddings=tied)
    parts = quantized_parts(header, recipe).values()
    weights = {name: dequantize(weight, torch.float32) for part in parts for name, weight in part.items()}
    model.lm_head.weight = torch.nn.Parameter(weights["lm_head.weight"])  # the embedding stays
    for name, parameter in model.named_parameters():
        parameter.data = weights.get(name.removeprefix("model."), parameter.data)
    with Artefact(tmp_path / "small", header, recipe) as artefact:
        write_rounded(artefact)
    expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(make_engine(tmp_path / "small").logits(IDS), expected, atol=1e-4, rtol=0)


def test_int4_lies_in_words_of_eight_codes_and_zero_points_in_bytes() -> None:
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 15], [8, 8, 8, 8, 8, 8, 8, 8, 9]], dtype=torch.uint8)
    zero = torch.tensor([[7], [9]], dtype=torch.uint8)
    parts = {"q": pack_int4(codes), "scale": torch.tensor([[0.5], [2.0]]), "zero": zero}
    weight = QuantizedTensor(packing.INT4, (2, 9), parts, 16)
    scheme = choose_scheme(weight, activations=False)
    found = to_stored_tensors(weight, scheme)
    words = [[0x76543210, 0x0000000F], [0x88888888, 0x00000009]]
    assert (found["weight_packed"].long() & 0xFFFFFFFF).tolist() == words
    assert found["weight_zero_point"].tolist() == [[-1], [1]]
    strategy = {"strategy": "block", "group_size": None, "block_structure": [1, 16]}
    assert scheme.config_group(["Linear"], 9)["weights"].items() >= strategy.items()
    assert found["weight_shape"].tolist() == [2, 9]
    assert (found["weight_packed"].dtype, found["weight_zero_point"].dtype) == (torch.int32, torch.int8)


def test_int8_in_groups_lies_in_words_of_four_codes() -> None:
    q = torch.tensor([[-128, -1, 0, 127, 5]], dtype=torch.int8)
    weight = QuantizedTensor(packing.INT8, (1, 5), {"q": q, "scale": torch.ones(1, 2)}, 4)
    found = to_stored_tensors(weight, choose_scheme(weight, activations=False))
    assert (found["weight_packed"].long() & 0xFFFFFFFF).tolist() == [[0xFF807F00, 0x00000085]]


def test_reordered_columns_are_restored_with_their_groups() -> None:
    order = torch.tensor([2, 0, 3, 1])
    parts = {"q": pack_int4(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)), "scale": torch.ones(1, 2)}
    weight = QuantizedTensor(packing.INT4, (1, 4), {**parts, "columns": order}, 2)
    scheme = choose_scheme(weight, activations=False)
    found = to_stored_tensors(weight, scheme)
    assert found["weight_packed"].tolist() == [[0x3142]]
    assert found["weight_g_idx"].tolist() == [0, 1, 0, 1]
    assert scheme.config_group(["Linear"], 4)["weights"]["actorder"] == "group"


def test_config_json_lists_quantized_and_skipped_modules(tmp_path: Path) -> None:
    header, _ = make_model(tmp_path / "model", tie_word_embeddings=True)
    with Artefact(tmp_path / "small", header, INT4) as artefact:
        write_rounded(artefact)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    layout = config["quantization_config"]
    assert config["tie_word_embeddings"] is False
    assert (layout["quant_method"], layout["format"]) == ("compressed-tensors", "pack-quantized")
    layers, head = layout["config_groups"]["group_0"], layout["config_groups"]["group_1"]
    assert (layers["targets"], layers["format"]) == (["Linear"], "pack-quantized")
    assert layers["weights"] == {
        **{"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False},
        **{"strategy": "group", "group_size": 32, "actorder": None},
    }
    assert (head["targets"], head["format"], head["weights"]["num_bits"]) == (["lm_head"], "pack-quantized", 8)
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["model.layers.1.mlp.up_proj.weight_packed"] == "model-layers.1.safetensors"
    assert index["model.embed_tokens.weight"] == "model-rest.safetensors"


def test_activations_in_int8_are_those_of_the_layers_alone(tmp_path: Path) -> None:
    header, _ = make_model(tmp_path / "model")
    with Artefact(tmp_path / "small", header, Recipe("smoothquant", 8, None, activations=True)) as artefact:
        write_rounded(artefact)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    layers, head = config["quantization_config"]["config_groups"].values()
    assert (layers["format"], layers["input_activations"]["strategy"]) == ("int-quantized", "token")
    assert (head["format"], head["input_activations"]) == ("pack-quantized", None)


def test_skipped_weights_are_named_and_bit_identical(tmp_path: Path) -> None:
    kinds = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    header, _ = make_model(tmp_path / "model", "Qwen3Moe", **kinds)
    with Artefact(tmp_path / "small", header, INT4) as artefact:
        write_rounded(artefact)
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "small" / "model-rest.safetensors")
    assert len(after) == len(before) - sum(len(p) for p in quantized_parts(header, INT4).values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == [f"model.layers.{i}.mlp.gate" for i in range(3)]


def test_routers_are_listed_as_skipped_by_every_method(tmp_path: Path) -> None:
    kinds = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    header, _ = make_model(tmp_path / "model", "Qwen3Moe", **kinds)
    with Artefact(tmp_path / "small", header, INT4) as artefact:
        quantize_layers(header, INT4, None, artefact, lambda *_: None, artefact.states)
        artefact.finish()
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == [f"model.layers.{i}.mlp.gate" for i in range(3)]


def test_experts_that_are_stacked_are_stored_one_by_one(tmp_path: Path) -> None:
    header, model = make_model(
        tmp_path / "model",
        "GptOss",
        **{
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    )
    with Artefact(tmp_path / "small", header, Recipe("rtn", 8, None)) as artefact:
        write_rounded(artefact)
    names = {name for file in (tmp_path / "small").glob("*.safetensors") for name in read_safetensors_header(file)}
    assert {f"model.layers.0.mlp.experts.{e}.gate_up_proj.weight_scale" for e in range(4)} <= names
    exact = model(torch.tensor([IDS])).logits[0]
    assert (make_engine(tmp_path / "small").logits(IDS) - exact).abs().mean() < exact.abs().mean() / 10


def test_tokenizer_templates_and_the_licence_come_along_and_no_program(tmp_path: Path) -> None:
    header, _ = make_model(tmp_path / "model")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    files = {"tokenizer.json": "{}", "chat_template.jinja": "x", "LICENSE": "y", "run.py": "z", "old.bin": "w"}
    files |= {"additional_chat_templates/rag.jinja": "r", "README.md": "---\nlicense: mit\n---\nHello"}
    for name, text in files.items():
        (tmp_path / "model" / name).write_text(text)
    with Artefact(tmp_path / "small", header, INT4) as artefact:
        write_rounded(artefact)
    found = content(tmp_path / "small")
    assert found["additional_chat_templates/rag.jinja"] == b"r" and found["LICENSE"] == b"y"
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= found.keys()
    assert not {"run.py", "old.bin"} & found.keys()
    assert (
        found["README.md"].startswith(b"---\nlicense: mit\n---\n")
        and b"INT4 in groups of 32" in found["README.md"]
    )


def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    header, _ = make_model(tmp_path / "model")
    parts = quantized_parts(header, INT4)
    with Artefact(tmp_path / "once", header, INT4) as artefact:
        write_rounded(artefact)
    for part in parts:
        with Artefact(tmp_path / "often", header, INT4) as artefact:
            artefact.write(part, parts[part])
        assert not (tmp_path / "often").exists()
    with Artefact(tmp_path / "often", header, INT4) as artefact:
        assert artefact.done == set(parts)
        artefact.finish()
    assert content(tmp_path / "often") == content(tmp_path / "once")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "often", "once"]


def test_a_run_of_another_recipe_or_source_is_not_resumed(tmp_path: Path) -> None:
    header, _ = make_model(tmp_path / "model")
    other, _ = make_model(tmp_path / "other", seed=1)
    with Artefact(tmp_path / "small", header, INT4) as artefact:
        artefact.write("layers.0", quantized_parts(header, INT4)["layers.0"])
    for wrong in ((header, Recipe("rtn", 8, None)), (other, INT4)):
        with pytest.raises(UsageError, match="started from another source or with another recipe"):
            Artefact(tmp_path / "small", *wrong)
    with Artefact(tmp_path / "small", other, INT4, force=True) as artefact:
        assert artefact.done == set()


def test_an_empty_partial_folder_is_reused(tmp_path: Path) -> None:
    """Happens if memory did not suffice for one method, and another is used."""
    header, _ = make_model(tmp_path / "model")
    with Artefact(tmp_path / "small", header, Recipe("gptq", 4, 32)):
        pass
    with Artefact(tmp_path / "small", header, INT4) as artefact:
        write_rounded(artefact)
    assert json.loads((tmp_path / "small" / "recipe.json").read_text())["recipe"]["method"] == "rtn"


def test_the_folder_stays_locked_until_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, _ = make_model(tmp_path / "model")
    parts = quantized_parts(header, INT4)
    with Artefact(tmp_path / "small", header, INT4) as artefact:
        artefact.write("layers.0", parts["layers.0"])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            Artefact(tmp_path / "small", header, Recipe("rtn", 8, None), force=True)
    with Artefact(tmp_path / "small", header, INT4) as artefact:
        assert artefact.done == set()
        write_rounded(artefact)


@pytest.mark.parametrize("name", [".", "/", ".."])
def test_a_path_without_a_name_is_rejected(name: str, tmp_path: Path) -> None:
    header, _ = make_model(tmp_path / "model")
    with pytest.raises(UsageError, match="cannot be the name of a new folder"):
        Artefact(Path(name), header, INT4, force=True)


def test_states_on_a_full_disk_are_one_error_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(states, "save_file", full)
    with pytest.raises(DiskFull, match="is full"):
        states.save_state(tmp_path, 1, "", states.QuantizationResult(), {"hidden": torch.zeros(9)})
    assert states.load_state(tmp_path, 1, "") is None


def test_a_changed_source_is_detected(tmp_path: Path) -> None:
    header, _ = make_model(tmp_path / "model")
    with Artefact(tmp_path / "small", header, INT4) as artefact:
        artefact.write("layers.0", quantized_parts(header, INT4)["layers.0"])
    os.utime(tmp_path / "model" / "model.safetensors", ns=(0, 0))
    with pytest.raises(UsageError, match="started from another source"):
        Artefact(tmp_path / "small", header, INT4)


def test_two_runs_cannot_write_the_same_folder(tmp_path: Path) -> None:
    header, _ = make_model(tmp_path / "model")
    with Artefact(tmp_path / "small", header, INT4), pytest.raises(UsageError, match="another process is writing"):
        Artefact(tmp_path / "small", header, INT4)


def test_foreign_files_are_never_replaced(tmp_path: Path) -> None:
    header, _ = make_model(tmp_path / "model")
    before = content(tmp_path / "model")
    for force in (False, True):
        with pytest.raises(UsageError, match="was not written by localllm"):
            Artefact(tmp_path / "model", header, INT4, force=force)
    (tmp_path / "small.partial").mkdir()
    (tmp_path / "small.partial" / "letter.txt").write_text("Dear")
    with pytest.raises(UsageError, match="was not written by localllm"):
        Artefact(tmp_path / "small", header, INT4, force=True)
    assert content(tmp_path / "model") == before
    assert (tmp_path / "small.partial" / "letter.txt").read_text() == "Dear"


def test_an_artefact_is_replaced_only_when_complete(tmp_path: Path) -> None:
    header, _ = make_model(tmp_path / "model")
    with Artefact(tmp_path / "small", header, INT4) as artefact:
        write_rounded(artefact)
    before = content(tmp_path / "small")
    with pytest.raises(UsageError, match="--force"):
        Artefact(tmp_path / "small", header, INT4)
    with Artefact(tmp_path / "small", header, Recipe("rtn", 8, None), force=True) as artefact:
        artefact.write("layers.0", quantized_parts(header, Recipe("rtn", 8, None))["layers.0"])
        assert content(tmp_path / "small") == before
        write_rounded(artefact)
    assert json.loads((tmp_path / "small" / "recipe.json").read_text())["recipe"]["bits"] == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "small"]


def test_too_little_disk_space_is_reported_before_any_work(tmp_path: Path) -> None:
    make_model(tmp_path / "model", tie_word_embeddings=True)
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if "embed_tokens" not in name}, file)
    rows = 2**34  # of 64 numbers: more than any disk of a test has, in a file that is all hole
    entry = {"dtype": "F32", "shape": [rows, 64], "data_offsets": [0, rows * 256]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (tmp_path / "model" / "model-2.safetensors").open("wb") as sparse:
        sparse.write(len(header).to_bytes(8, "little") + header)
        sparse.truncate(8 + len(header) + rows * 256)
    placed = {name: file.name for name in read_safetensors_header(file)} | {
        "model.embed_tokens.weight": "model-2.safetensors"
    }
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(DiskFull, match=r"will take about \d.* but the disk has"):
        Artefact(tmp_path / "small", read_header(tmp_path / "model"), INT4)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_quantized_already_is_not_quantized_again(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a GGUF file"):
        Artefact(tmp_path / "small", read_header(shared("stories260K-f32.gguf")), INT4)
    header, _ = make_model(tmp_path / "model")
    with Artefact(tmp_path / "small", header, INT4) as artefact:
        write_rounded(artefact)
    with pytest.raises(UsageError, match=r"already quantized \(pack-quantized"):
        Artefact(tmp_path / "smaller", read_header(tmp_path / "small"), INT4)


def test_groups_that_do_not_divide_the_rows_are_refused_with_those_that_do(tmp_path: Path) -> None:
    header, _ = make_model(tmp_path / "model", intermediate_size=96)
    check_group_size(header, INT4)
    check_group_size(header, Recipe("rtn", 8, None))
    with pytest.raises(UsageError, match=r"groups of 128 do not divide the (64|96) columns .* --group 32 does"):
        check_group_size(header, Recipe("rtn", 4, 128))
    uneven, _ = make_model(tmp_path / "uneven", intermediate_size=100)
    with pytest.raises(UsageError, match="--bits 8 --group 0"):
        check_group_size(uneven, INT4)


def test_most_modules_are_the_target_and_the_others_are_listed() -> None:
    weight = QuantizedTensor(packing.INT8, (1, 4), {"q": torch.zeros(1, 4), "scale": torch.ones(1, 1)})
    plain, packed = (choose_scheme(weight, activations=activations) for activations in (True, False))
    found = quantization_config({"a": plain, "b": packed, "c": plain}, ["d"], 4)
    assert [group["targets"] for group in found["config_groups"].values()] == [["Linear"], ["b"]]
    assert (found["ignore"], found["format"]) == (["d"], "mixed-precision")
