"""The page of `diff`, `quantize` and `show`: what is on it, and that a terminal of 80 columns holds it."""

import dataclasses

from localllm.cli.quality_page import text_of
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
    page = rows(text_of(QUALITY))
    assert page["recipe"] == "method gptq, bits 4, group 128, symmetric True, activations"
    assert page["weights"] == "2.50 GB 800 MB"
    assert page["computes in"] == "bfloat16 bfloat16"
    assert page["KV cache in"] == "bfloat16 int8"
    assert page["perplexity"] == "12.35 ± 0.51 12.5 ± 0.52"
    assert page["text, one run"] == "123 tokens/s 130 tokens/s"
    assert page["decoding, one run"] == "21.5 tokens/s 40.2 tokens/s"
    assert page["perplexity changes by"] == "+1.26% ± 0.21%"
    assert page["KL divergence, nats"] == "0.0123 ± 0.0004 on average"
    assert "0.0045 median, 0.123 at 99%" in text_of(QUALITY)
    assert "1.75 at most" in text_of(QUALITY)
    assert page["same likeliest token"] == "95.10% ± 0.42%"
    assert page["right token's chance"] == "-0.31% ± 0.004% on average"
    assert "3.10% root mean square" in text_of(QUALITY)
    assert page["layers.3.mlp.down_proj"] == "21.00%"
    assert (page["layer 15"], "layer 10" in page) == ("1.60%", False)
    assert "2 of 64 tokens are the same" in text_of(QUALITY)


def test_every_line_fits_a_terminal_of_80_columns() -> None:
    page = text_of(QUALITY)
    assert max(map(len, page.splitlines())) <= 80, page


def test_what_was_not_measured_is_not_on_the_page() -> None:
    reference, other = (
        dataclasses.replace(side, kv_dtype=None, text_tokens_per_s=None, decode_tokens_per_s=None)
        for side in (QUALITY.reference, QUALITY.other)
    )
    bare = dataclasses.replace(
        QUALITY, reference=reference, other=other, answers=(), layers=(), matrices=(), recipe=None
    )
    page = text_of(bare)
    assert not any(word in page for word in ("recipe", "KV", "one run", "WORST", "prompt", "\n\n\n"))


def test_the_worst_matrices_come_first_however_they_are_given() -> None:
    errors = tuple(Error(f"matrix {i}", value) for i, value in enumerate((0.1, 0.5, 0.3)))
    lines = text_of(dataclasses.replace(QUALITY, matrices=errors, layers=())).splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("matrix")] == [
        "matrix 1",
        "matrix 2",
        "matrix 0",
    ]


def test_numbers_too_small_for_two_places_keep_two_digits() -> None:
    small = dataclasses.replace(QUALITY.distance, log_ratio=Estimate(-1.25e-7, 3e-8))
    page = text_of(dataclasses.replace(QUALITY, distance=small))
    assert rows(page)["perplexity changes by"] == "-1.2e-05% ± 3e-06%"
