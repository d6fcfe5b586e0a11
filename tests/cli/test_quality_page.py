"""The quality pages of `diff`, `quantize` and `show` fit a terminal of 80 columns."""

import dataclasses
from typing import Any

import pytest

from localllm.cli.quality_page import format_quality
from localllm.quality.report import Error, Estimate
from tests.quality.example import QUALITY


def rows(page: str) -> dict[str, str]:
    found = {}
    for line in page.splitlines():
        name, _, value = line.partition("  ")
        if name:
            found[name] = " ".join(value.split())
    return found


def test_every_number_is_on_the_page() -> None:
    page = rows(format_quality(QUALITY))
    assert page["recipe"] == "gptq, INT4 in groups of 128, head in INT8"
    assert page["weights"] == "2.50 GB 800 MB"
    assert page["dtype"] == "bfloat16 bfloat16"
    assert page["KV cache in"] == "bfloat16 int8"
    assert page["perplexity"] == "12.35 ± 0.510 12.50 ± 0.520"
    assert page["prefill, one run"] == "123 tokens/s 130 tokens/s"
    assert page["decode, one run"] == "21.5 tokens/s 40.2 tokens/s"
    assert page["perplexity change"] == "+1.26% ± 0.21%"
    assert page["KL divergence, nats"] == "0.01230 ± 0.000400 on average"
    assert "0.004500 median, 0.1230 at 99%" in format_quality(QUALITY)
    assert "1.750 at most" in format_quality(QUALITY)
    assert page["same top token"] == "95.10% ± 0.42%"
    assert page["token probability"] == "-0.31% ± 0.0040% on average"
    assert "3.10% root mean square" in format_quality(QUALITY)
    assert page["layers.3.mlp.down_proj"] == "21.00%"
    assert (page["layer 15"], "layer 10" in page) == ("1.60%", False)
    assert "2 of 64 tokens are identical" in format_quality(QUALITY)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"group": None, "bits": 8}, "gptq, INT8 with a scale per row, head in INT8"),
        ({"symmetric": False, "head_bits": 16}, "gptq, INT4 in groups of 128, zero points, head not quantized"),
        (
            {"method": "smoothquant", "bits": 8, "group": None, "activations": True},
            "smoothquant, INT8 with a scale per row, activations in INT8, head in INT8",
        ),
        (
            {"of_later": 1},
            "method gptq, bits 4, group 128, symmetric True, activations False, head_bits 8, of_later 1",
        ),
    ],
)
def test_a_recipe_is_reported_in_words(changed: dict[str, Any], words: str) -> None:
    page = format_quality(dataclasses.replace(QUALITY, recipe={**(QUALITY.recipe or {}), **changed}))
    assert " ".join(page.partition("recipe")[2].partition("text ")[0].split()) == words


def test_every_line_fits_a_terminal_of_80_columns() -> None:
    page = format_quality(QUALITY)
    assert max(map(len, page.splitlines())) <= 80, page


def test_what_was_not_measured_is_not_on_the_page() -> None:
    reference, other = (
        dataclasses.replace(side, kv_dtype=None, text_tokens_per_s=None, decode_tokens_per_s=None)
        for side in (QUALITY.reference, QUALITY.other)
    )
    bare = dataclasses.replace(
        QUALITY, reference=reference, other=other, answers=(), layers=(), matrices=(), recipe=None
    )
    page = format_quality(bare)
    assert not any(word in page for word in ("recipe", "KV", "one run", "WORST", "prompt", "\n\n\n"))


def test_the_worst_matrices_come_first_however_they_are_given() -> None:
    errors = tuple(Error(f"matrix {i}", value) for i, value in enumerate((0.1, 0.5, 0.3)))
    lines = format_quality(dataclasses.replace(QUALITY, matrices=errors, layers=())).splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("matrix")] == [
        "matrix 1",
        "matrix 2",
        "matrix 0",
    ]


def test_numbers_too_small_for_two_places_keep_two_digits() -> None:
    small = dataclasses.replace(QUALITY.distance, log_ratio=Estimate(-1.25e-7, 3e-8))
    page = format_quality(dataclasses.replace(QUALITY, distance=small))
    assert rows(page)["perplexity change"] == "-1.2e-05% ± 3.0e-06%"
