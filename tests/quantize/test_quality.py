"""The quality loss claimed in docs/quantize.md, measured on text outside the calibration set."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from localllm.quantize.source import Recipe
from tests.quantize.table import DEMO, RECIPES, EvaluatedModel, of_stories
from tests.shared import shared

pytestmark = pytest.mark.slow

W8A8 = [recipe for recipe in RECIPES if recipe.activations]  # rtn, smoothquant

MODELS = {
    "stories": lambda: of_stories(shared("stories260K")),
    "demo, children's stories": lambda: of_stories(DEMO),
}


@pytest.fixture(scope="module", params=MODELS)
def judged(request: pytest.FixtureRequest) -> EvaluatedModel:
    shared("text/tiny.txt")
    return MODELS[request.param]()


def test_int8_is_within_half_a_percent_of_float32(judged: EvaluatedModel) -> None:
    exact = judged.perplexity(judged.exact)
    for method in ("rtn", "gptq"):
        found = judged.quality(Recipe(method, 8, None))
        assert abs(found.perplexity / exact - 1) < 0.005
        assert found.divergence < 0.002


def test_gptq_and_awq_are_better_than_round_to_nearest(judged: EvaluatedModel) -> None:
    nearest, gptq, awq = (judged.quality(Recipe(method, 4, 32)) for method in ("rtn", "gptq", "awq"))
    assert gptq.divergence < awq.divergence < nearest.divergence
    assert gptq.perplexity < nearest.perplexity  # of AWQ within chance of each other


def test_smoothing_is_better_than_none(judged: EvaluatedModel) -> None:
    plain, smooth = map(judged.quality, W8A8)
    assert smooth.divergence < plain.divergence


def test_smoothing_compensates_outliers(tmp_path: Path) -> None:
    """Large models have input columns that are a hundred times larger than others. The test creates them by
    scaling norms and the columns after them, which does not change results in float32.
    """
    source = shared("stories260K")
    judged = of_stories(source)
    weights = load_file(source / "model.safetensors")
    behind = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up"))
    for name, tensor in weights.items():
        if name.endswith("layernorm.weight"):
            tensor[::16] *= 100
        elif name.endswith(behind):
            tensor[:, ::16] /= 100
    for file in source.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    judged.folder = tmp_path
    plain, smooth = map(judged.quality, W8A8)
    exact = judged.perplexity(judged.exact)
    assert plain.perplexity > 1.02 * exact
    assert abs(smooth.perplexity / exact - 1) < 0.005
    assert smooth.divergence < 0.1 * plain.divergence
