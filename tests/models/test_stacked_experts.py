"""Stacked experts under Triton's interpreter give the logits of `transformers`."""

from pathlib import Path

import pytest

from localllm.runtime.kernels.experts import StackedExperts
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
