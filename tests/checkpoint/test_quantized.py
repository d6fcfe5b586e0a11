"""Quantized checkpoints as they lie on the Hub give the logits of what their weights mean."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import published
from tests.models.proofs import difference, token_ids
from tests.tiny import make_engine

IDS = token_ids(40)


def check(folder: Path, model: Any, bound: float = 1e-3) -> Any:
    engine = make_engine(folder)
    assert difference(engine.logits(IDS), model(torch.tensor([IDS])).logits[0]) <= bound
    return engine


@pytest.mark.parametrize("layout", published.LAYOUTS)
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, layout: str) -> None:
    writer, quantization = published.LAYOUTS[layout]
    check(tmp_path, published.write(tmp_path, writer, quantization))
