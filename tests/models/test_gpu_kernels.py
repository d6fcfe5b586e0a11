"""Stacked experts and prepared norms, under Triton's interpreter, give the logits of `transformers`."""

from pathlib import Path

import pytest
from torch import Tensor

from localllm.runtime.kernels.experts import StackedExperts
from localllm.runtime.kernels.norm import FollowingNorm, Norm, PreparedNorm
from localllm.runtime.layers.ffn import MoE
from tests.models.families import FAMILIES
from tests.models.proofs import difference, logits_of_transformers, token_ids
from tests.tiny import make_checkpoint, make_engine


@pytest.mark.quick_every(2)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("family", ["gpt-oss", "Qwen3-MoE"])
def test_stacked_experts_have_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    theirs = make_checkpoint(tmp_path, kind, **changes)
    engine = make_engine(tmp_path)
    mixtures = [layer.ffn for layer in engine.runner.model.layers if isinstance(layer.ffn, MoE)]
    assert len(mixtures) == 3 and all(isinstance(ffn.experts, StackedExperts) for ffn in mixtures)
    for count in (2, 18):  # few tokens, and more than few
        ids = token_ids(count)
        assert difference(engine.logits(ids), logits_of_transformers(theirs, ids)) <= 2e-4


@pytest.mark.quick_every(3)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # 1 / (1 + infinity) is the 0 that is meant
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("Llama 3.x", 5),  # all but the first of three layers' six
        ("LFM2", 5),
        ("Qwen3-MoE, some dense", 2),  # before and after the dense layer's feed-forward
        ("DeepSeek-V2-Lite", 1),  # latent attention reads the norm twice
        ("Command R7B", 0),  # norms of both halves of a layer at once
        ("Gemma 4, like E2B", 0),  # norms after the products
    ],
)
def test_products_prepare_the_norms_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, expected: int
) -> None:
    kind, changes = FAMILIES[family]
    theirs = make_checkpoint(tmp_path, kind, **changes)
    engine = make_engine(tmp_path)
    norms, of = list[Norm](), FollowingNorm.of

    def noted(following: FollowingNorm, x: Tensor) -> Norm:
        norms.append(of(following, x))
        return norms[-1]

    monkeypatch.setattr(FollowingNorm, "of", noted)
    for count, prepared in ((2, expected), (18, 0)):  # few tokens, and more than few
        norms.clear()
        ids = token_ids(count)
        assert difference(engine.logits(ids), logits_of_transformers(theirs, ids)) <= 2e-4
        assert sum(isinstance(norm, PreparedNorm) for norm in norms) == prepared
