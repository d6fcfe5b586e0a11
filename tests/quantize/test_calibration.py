from pathlib import Path

import pytest
import torch

from localllm.errors import UsageError
from localllm.quantize import quantizer
from localllm.text.tokenizer import Tokenizer
from tests.shared import shared


def test_windows_are_spread_over_the_text() -> None:
    ids = list(range(100_000))
    found = quantizer.calibration_windows(ids, 4096)
    assert found.shape == (64, 512)
    assert all(torch.equal(window, torch.arange(window[0], window[0] + 512)) for window in found)
    assert found[0, 0] == 0
    assert found[-1, 0] == 194 * 512  # the last whole one
    gaps = found[1:, 0] - found[:-1, 0]
    assert gaps.min() >= 512
    assert gaps.max() <= 4 * 512


def test_a_short_context_has_short_windows() -> None:
    assert quantizer.calibration_windows(list(range(2048)), 100).shape == (20, 100)


def test_a_text_that_is_too_short_is_reported_with_both_numbers() -> None:
    with pytest.raises(UsageError, match="the calibration text has 2047 tokens, but 2048 are needed"):
        quantizer.calibration_windows(list(range(2047)), 4096)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("folder", ["stories260K", "tokenizers/qwen3", "tokenizers/phi-3-mini", "llama3.2-bpe"])
def test_the_default_text_is_long_enough_for_real_tokenizers(folder: str) -> None:
    tokenizer = Tokenizer.from_folder(Path(shared(folder)))
    assert len(quantizer.calibration_windows(tokenizer.encode(quantizer.default_calibration_text()), 4096)) >= 8
