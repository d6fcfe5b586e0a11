"""Every layer type is folded, scaled and quantized, on random checkpoints of the families."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, read_header
from localllm.plan.weights import UNQUANTIZED_MATRIX
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize.folds import apply_fold, find_folds
from localllm.quantize.layers import HiddenStates, RecordedWeights, build_layer
from localllm.quantize.quantizer import quantize_layers
from localllm.quantize.source import Recipe
from tests.models.families import FAMILIES
from tests.quantize.reference import MemoryArtefact, plain
from tests.tiny import make_checkpoint, make_engine

KINDS = [
    "Llama 2",
    "Llama, biases",
    "Qwen3",
    "Gemma 2",
    "Gemma 3",
    "Gemma 4, like E2B",
    "Gemma 4, like 26B-A4B",
    "Phi-3",
    "Mixtral",
    "Qwen3-MoE, some dense",
    "gpt-oss",
    "OLMo 2",
    "Command R7B",
    "DeepSeek-V3",
    "Qwen3-Next",
    "LFM2",
]
RECIPES = [
    Recipe("rtn", 4, 32),
    Recipe("gptq", 4, 32, symmetric=False),
    Recipe("awq", 4, 32),
    Recipe("smoothquant", 8, None, activations=True),
]


@pytest.fixture(scope="module", params=KINDS)
def header(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Header:
    kind, changes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    make_checkpoint(folder, kind, **changes)
    return read_header(folder)


def text(windows: int = 3, length: int = 40) -> Tensor:
    return torch.randint(1, 320, (windows, length), generator=torch.Generator().manual_seed(3))


def test_layer_by_layer_hidden_states_match_the_model(header: Header) -> None:
    config, ids = parse_config(header.config), text()
    stream = HiddenStates(header, config, ids)
    for index in range(len(config.layers)):
        stream.run_layer(
            build_layer(header, config, index, RecordedWeights(), torch.float32, stack=True), index, keep=True
        )
    engine = make_engine(Path(header.path))
    model = engine.runner.model
    logits = model.lm_head(model.norm(stream.hidden[-1])) * config.logit_scale
    if config.logit_softcap:
        logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
    torch.testing.assert_close(logits, engine.logits(ids[-1].tolist()), atol=2e-4, rtol=1e-4)


def test_folding_changes_no_result(header: Header) -> None:
    config, ids = parse_config(header.config), text()
    exact, folded = HiddenStates(header, config, ids), HiddenStates(header, config, ids)
    generator, count = torch.Generator().manual_seed(5), 0
    for index, layer in enumerate(config.layers):
        holding = RecordedWeights()
        exact.run_layer(build_layer(header, config, index, holding, torch.float32, stack=True), index, keep=True)
        others_read = index in folded.shared_kv_layers
        for fold in find_folds(layer, f"layers.{index}.", holding.tensors, others_read):
            columns = holding.tensors[f"{fold.readers[0]}.weight"].shape[1]
            s = fold.nearest_foldable(torch.exp2(torch.randn(columns, generator=generator)))
            kept = {name: holding.tensors[f"{name}.weight"] for name in fold.readers if kept_as_it_is(name)}
            apply_fold(fold, s, holding.tensors, header.layout.norm_offset)
            count += 1
            for name, before in kept.items():  # powers of two: not a bit is lost
                assert torch.equal(holding.tensors[f"{name}.weight"].bfloat16() / s, before.bfloat16().float())
        folded.run_layer(build_layer(header, config, index, holding, torch.float32, stack=True), index, keep=True)
    assert count >= len(config.layers)
    torch.testing.assert_close(folded.hidden, exact.hidden, atol=3e-4, rtol=3e-4)


def kept_as_it_is(name: str) -> bool:
    return UNQUANTIZED_MATRIX.fullmatch(f"{name}.weight") is not None


@pytest.mark.quick_every(13)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.method)
def test_every_method_takes_every_family(header: Header, recipe: Recipe) -> None:
    kept = MemoryArtefact()
    outcome = quantize_layers(header, recipe, text(), kept, lambda *_: None)
    made = kept.tensors
    missing = header.tensors.keys() - made.keys()
    assert {name for name in missing if not name.startswith("lm_head.")} == set()
    for name, entry in header.tensors.items():
        assert tuple(made[name].shape) == entry.shape
        if isinstance(made[name], Tensor):
            assert made[name].is_floating_point()
    packed = {name.removesuffix(".weight") for name, tensor in made.items() if isinstance(tensor, QuantizedTensor)}
    assert packed == outcome.errors.keys()
    assert not any(kept_as_it_is(name) for name in packed)
    assert all(torch.isfinite(plain(made[f"{name}.weight"])).all() for name in packed)
    limit = 0.3 if recipe.bits == 4 else 0.1
    assert all(0 < error < limit for error in outcome.errors.values()), max(
        outcome.errors.items(), key=lambda e: e[1]
    )
