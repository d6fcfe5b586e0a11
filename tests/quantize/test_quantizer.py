"""A quantization run: resumed after a kill, within its memory, refused for unsupported models."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, read_header
from localllm.errors import DamagedModel, DoesNotFit, UsageError
from localllm.quant.grid import Grid, quantize_rtn
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize import check, gptq
from localllm.quantize.quantizer import quantize_layers
from localllm.quantize.source import Recipe
from localllm.runtime.kernels.norm import Norm
from tests.models.families import FAMILIES
from tests.quantize.reference import MemoryArtefact, plain, write_plain
from tests.tiny import make_checkpoint, make_engine

CALIBRATED = [
    Recipe("gptq", 4, 32),
    Recipe("awq", 4, 32, symmetric=False),
    Recipe("smoothquant", 8, None, activations=True),
]


def text(windows: int = 4, length: int = 48) -> Tensor:
    return torch.randint(1, 320, (windows, length), generator=torch.Generator().manual_seed(3))


def silent(*_: object) -> None:
    pass


@pytest.fixture
def header(tmp_path: Path) -> Header:
    make_checkpoint(tmp_path / "model", "Llama")
    return read_header(tmp_path / "model")


class Killed(Exception):
    pass


class KilledArtefact(MemoryArtefact):
    """An artefact that is killed before a part is complete."""

    def __init__(self, at: str):
        super().__init__()
        self.at = at

    def write(self, part: str, tensors: Mapping[str, Tensor | QuantizedTensor]) -> None:
        if part == self.at:
            self.at = ""
            raise Killed
        super().write(part, tensors)


def same(a: MemoryArtefact, b: MemoryArtefact) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(
        torch.equal(plain(a.tensors[name]), plain(b.tensors[name])) for name in a.tensors
    )


@pytest.mark.quick_every(11)
@pytest.mark.parametrize("recipe", [Recipe("rtn", 4, 32), *CALIBRATED], ids=lambda recipe: recipe.method)
@pytest.mark.parametrize("kind", ["Llama, biases", "Gemma 4, like E2B"])
def test_a_killed_run_resumes_at_its_layer(kind: str, recipe: Recipe, tmp_path: Path) -> None:
    family, changes = FAMILIES[kind]
    make_checkpoint(tmp_path / "model", family, **changes)
    header = read_header(tmp_path / "model")
    count = len(parse_config(header.config).layers)
    whole, at = MemoryArtefact(), tmp_path / "states"
    at.mkdir()
    expected = quantize_layers(header, recipe, text(), whole, silent)
    for part in ("layers.0", f"layers.{count - 1}", "head"):
        dying = KilledArtefact(part)
        with pytest.raises(Killed):
            quantize_layers(header, recipe, text(), dying, silent, at)
        written: list[str] = []

        class Noting(MemoryArtefact):
            def write(self, part: str, tensors: Mapping[str, Tensor | QuantizedTensor]) -> None:
                written.append(part)  # noqa: B023 - used within the round
                super().write(part, tensors)

        second = Noting()
        second.parts = dying.parts
        found = quantize_layers(header, recipe, text(), second, silent, at)
        assert written[0] == part
        assert same(whole, second)
        assert found == expected
        assert [file.name for file in at.iterdir()] == [f"states-{count}.safetensors"]
        for file in at.iterdir():
            file.unlink()


def test_another_text_or_damaged_states_restart(header: Header, tmp_path: Path) -> None:
    other = torch.randint(1, 320, (4, 48), generator=torch.Generator().manual_seed(9))
    expected = MemoryArtefact()
    quantize_layers(header, CALIBRATED[0], other, expected, silent)
    for damage in (False, True):
        dying = KilledArtefact("layers.2")
        with pytest.raises(Killed):
            quantize_layers(header, CALIBRATED[0], other if damage else text(), dying, silent, tmp_path)
        if damage:
            (tmp_path / "states-2.safetensors").write_bytes(b"\x09" * 40)
        quantize_layers(header, CALIBRATED[0], other, dying, silent, tmp_path)
        assert same(expected, dying)


def test_progress_counts_every_part_once(header: Header) -> None:
    seen: list[tuple[str, int, int]] = []
    quantize_layers(header, Recipe("rtn", 8, None), None, MemoryArtefact(), lambda *step: seen.append(step))
    assert seen == [
        (part, i + 1, 5) for i, part in enumerate(("tables", "layers.0", "layers.1", "layers.2", "head"))
    ]


def test_what_is_not_quantized_keeps_its_dtype_and_a_tied_head_becomes_its_own(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "Llama", tie_word_embeddings=True)
    model.bfloat16().save_pretrained(tmp_path / "model")
    header = read_header(tmp_path / "model")
    for recipe, has_head in ((Recipe("awq", 4, 32), True), (Recipe("rtn", 4, 32, head_bits=16), False)):
        kept = MemoryArtefact()
        quantize_layers(header, recipe, text(), kept, silent)
        assert ("lm_head.weight" in kept.tensors) == has_head
        for name, tensor in kept.tensors.items():
            if isinstance(tensor, QuantizedTensor):
                assert tensor.parts["scale"].dtype == torch.bfloat16
                assert tensor.format == ("int8" if name == "lm_head.weight" else "int4")
            else:
                assert tensor.dtype == torch.bfloat16
    head = MemoryArtefact()
    quantize_layers(header, Recipe("rtn", 4, 32), None, head, silent)
    written = head.tensors["lm_head.weight"]
    embedding = load_file(tmp_path / "model/model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(
        plain(written), plain(quantize_rtn(embedding, Grid(8, None, scale_dtype=torch.bfloat16)))
    )


def test_what_is_not_quantized_keeps_every_bit_also_beside_narrower_weights(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = make_checkpoint(tmp_path, "Qwen3Moe", attention_bias=True, **sizes).bfloat16()
    wide = ("embed_tokens", ".gate.weight", "norm", "bias")
    stored = {
        name: torch.randn(tensor.shape) if any(part in name for part in wide) else tensor.detach()
        for name, tensor in model.state_dict().items()
    }
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    header = read_header(tmp_path)
    for recipe in (Recipe("rtn", 8, None), Recipe("gptq", 4, 32)):
        kept = MemoryArtefact()
        quantize_layers(header, recipe, text(), kept, silent)
        plain = {name: tensor for name, tensor in kept.tensors.items() if isinstance(tensor, Tensor)}
        assert {
            "embed_tokens.weight",
            "layers.0.mlp.router.weight",
            "layers.0.self_attn.q_proj.bias",
        } <= plain.keys()
        for name, tensor in plain.items():
            assert torch.equal(tensor, stored[header.tensors[name].name])
            assert tensor.dtype == stored[header.tensors[name].name].dtype


def test_matrices_of_zeros_are_off_by_nothing(header: Header) -> None:
    weights = load_file(header.path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][:] = 0
    save_file(weights, header.path / "model.safetensors", {"format": "pt"})
    for recipe in (Recipe("rtn", 4, 32), *CALIBRATED):
        outcome = quantize_layers(read_header(header.path), recipe, text(), MemoryArtefact(), silent)
        assert outcome.errors["layers.1.mlp.down_proj"] == 0


def test_a_run_that_was_killed_after_its_last_part_knows_every_error(header: Header, tmp_path: Path) -> None:
    kept, at = MemoryArtefact(), tmp_path / "states"
    at.mkdir()
    expected = quantize_layers(header, CALIBRATED[0], text(), kept, silent, at)
    assert quantize_layers(header, CALIBRATED[0], text(), kept, silent, at) == expected


def test_a_model_in_float64_is_quantized_as_one_in_float32(header: Header) -> None:
    weights = load_file(header.path / "model.safetensors")
    expected, made = MemoryArtefact(), MemoryArtefact()
    quantize_layers(header, CALIBRATED[0], text(), expected, silent)
    save_file({n: t.double() for n, t in weights.items()}, header.path / "model.safetensors", {"format": "pt"})
    quantize_layers(read_header(header.path), CALIBRATED[0], text(), made, silent)
    assert same(expected, made)


@pytest.mark.parametrize(
    "recipe", [Recipe("awq", 8, None), Recipe("gptq", 8, None)], ids=lambda recipe: recipe.method
)
def test_moments_of_whole_rows_are_counted(header: Header, recipe: Recipe) -> None:
    config, group = parse_config(header.config), replace(recipe, group=32)
    columns = max(tensor.shape[-1] for name, tensor in header.tensors.items() if "down_proj" in name)
    taken = check.required_memory_bytes(header, config, recipe, 0) - check.required_memory_bytes(
        header, config, group, 0
    )
    assert taken == (4 * columns * (columns - 32) if recipe.method == "awq" else 0)


def test_layers_are_calibrated_on_quantized_outputs(header: Header, tmp_path: Path) -> None:
    """GPTQ of the second layer uses inputs that the engine computes from the quantized first layer."""
    recipe, kept = Recipe("gptq", 4, 32, head_bits=16), MemoryArtefact()
    quantize_layers(header, recipe, text(), kept, silent)
    engine = make_engine(write_plain(kept, header, tmp_path / "plain"))
    original = make_engine(header.path).runner.model
    layer, heard = engine.runner.model.layers[1], []
    inner = original.layers[1].mixer.qkv.weights[0]
    qkv = layer.mixer.qkv

    def listen(x: Tensor, norm: Norm) -> Tensor:
        heard.append(norm(x))
        return qkv(x, norm=norm)

    layer.mixer.qkv = listen
    for window in text():
        engine.logits(window.tolist())
    x = torch.cat(heard)
    expected = torch.cat(
        [plain(gptq.quantize(w, x.T @ x, Grid(4, 32))) for w in inner.split([60, 20, 20])]  # q, k, v
    )
    near = (qkv.weights[0] - expected).abs() < 1e-5
    assert near.float().mean() > 0.99


def test_experts_that_hardly_a_token_reached_are_rounded_and_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3Moe", num_experts=16, num_experts_per_tok=1, moe_intermediate_size=40)
    header = read_header(tmp_path)
    nearest = MemoryArtefact()
    quantize_layers(header, Recipe("rtn", 4, 32), None, nearest, silent)
    kept = MemoryArtefact()
    outcome = quantize_layers(header, CALIBRATED[0], text(8, 48), kept, silent)
    experts = [name for name in outcome.errors if ".mlp.experts." in name]
    assert 0 < len(outcome.rounded) < len(experts)
    assert set(outcome.rounded) <= set(experts)
    for name in experts:
        as_nearest = torch.equal(plain(nearest.tensors[f"{name}.weight"]), plain(kept.tensors[f"{name}.weight"]))
        assert as_nearest == (name in outcome.rounded)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe("rtn", 3), "3 bits are not supported; 4 and 8 are"),
        (Recipe("rtn", 4, 48), "groups of 48 are not supported; 32, 64, 128 and whole rows are"),
        (Recipe("rtn", 4, 0), "groups of 0 are not supported"),
        (Recipe("gptq", 4, -32), "groups of -32 are not supported"),
        (Recipe("rtn", 8, None, head_bits=4), "a head of 4 bits is not supported"),
        (Recipe("rtn", 8, 128, activations=True), "activations can be quantized only with"),
        (Recipe("gptq", 4, None, activations=True), "activations can be quantized only with"),
        (Recipe("smoothquant", 8, None), "smoothquant requires quantized activations"),
        (Recipe("awq", 8, None, activations=True), "awq quantizes weights only"),
        (Recipe("gptq", 4, 128), "gptq needs a calibration text"),
        (replace(Recipe(), method="hqq"), "there is no method 'hqq'"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_impossible_requests_are_reported_before_reading(header: Header, recipe: Recipe, words: str) -> None:
    kept = MemoryArtefact()
    with pytest.raises(UsageError, match=re.escape(words)):
        quantize_layers(header, recipe, None, kept, silent)
    assert not kept.parts


def test_too_little_memory_is_reported_before_reading(header: Header, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "free_host_bytes", lambda: 10_000_000)
    kept = MemoryArtefact()
    with pytest.raises(
        DoesNotFit, match=r"quantizing with awq takes \d+ MB, but 10.0 MB are free; free memory, or"
    ):
        quantize_layers(header, CALIBRATED[1], text(), kept, silent)
    assert not kept.parts


@pytest.mark.parametrize("recipe", CALIBRATED, ids=lambda recipe: recipe.method)
def test_activations_that_are_not_finite_name_their_matrix(tmp_path: Path, recipe: Recipe) -> None:
    make_checkpoint(tmp_path, "Llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][:] = 3e38  # finite, but not what it gives
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DamagedModel, match=r"inputs of layers.1.mlp.down_proj are NaN or infinite"):
        quantize_layers(read_header(tmp_path), recipe, text(), MemoryArtefact(), silent)


MEASURED = """
import resource, sys
import torch
from pathlib import Path
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.quantize.source import Recipe
from localllm.quantize.check import TRANSIENT, required_memory_bytes
from localllm.quantize.quantizer import quantize_layers

class Nowhere:
    done = set()
    def write(self, part, tensors):
        pass

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(1)
header, ids = read_header(Path(sys.argv[1])), torch.randint(1, 320, (8, 256))
config = parse_config(header.config)
recipe = Recipe(sys.argv[2], 4, 128)
quantize_layers(read_header(Path(sys.argv[3])), recipe, ids[:4], Nowhere(), lambda *_: None)  # torch's own
before = peak()
quantize_layers(header, recipe, ids, Nowhere(), lambda *_: None)
print(peak() - before, required_memory_bytes(header, config, recipe, ids.numel()) - TRANSIENT, header.stored_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_peak_memory_is_that_of_one_layer(method: str, tmp_path: Path) -> None:
    """Mapped pages of the file count, too, unless the system reclaims them."""
    sizes = {"hidden_size": 640, "intermediate_size": 1792, "head_dim": 64, "num_attention_heads": 10}
    make_checkpoint(tmp_path / "model", "Llama", **sizes, num_hidden_layers=8)
    make_checkpoint(tmp_path / "small", "Llama")
    arguments = [tmp_path / "model", method, tmp_path / "small"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    taken, needed, stored = map(int, done.stdout.split())
    assert taken < needed + 2**26  # tiles, and what the allocator keeps
    assert needed < stored
