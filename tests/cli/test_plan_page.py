"""The page that `localllm plan` prints: what is on it, and that a terminal of 80 columns holds it."""

from typing import Any

import pytest

from localllm.cli.plan import format_plan
from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.plan.plan import Expectation, plan_model
from tests.plan.published import LLAMA_8B, LLAMA_70B, header_of

RATES = Expectation(bandwidth=1e10, flops=1e11, step_s=0.01, source="123 answers of this machine")


@pytest.mark.parametrize(
    ("config", "gpu", "wish"),
    [
        (LLAMA_70B, "h100", LoadOptions(4096, users=1000, quant="int4")),
        (LLAMA_70B, "rtx pro 6000 blackwell", LoadOptions(131_072, users=30)),
        (LLAMA_8B, "v100 32gb", LoadOptions()),
        (LLAMA_8B, "v100 32gb", LoadOptions(users=12, kv_dtype="fp8")),
        (LLAMA_8B, "h200", LoadOptions(1024, users=64)),
        (LLAMA_8B | {"max_position_embeddings": 10**6}, "h200", LoadOptions(users=10**6)),
    ],
    ids=str,
)
def test_every_line_fits_a_terminal_of_80_columns(config: dict[str, Any], gpu: str, wish: LoadOptions) -> None:
    page = format_plan(
        plan_model(
            header_of(config), find_device(gpu), wish, name="an-owner/a-model-of-some-name", expectation=RATES
        )
    )
    assert max(map(len, page.splitlines())) <= 80, page


def test_expected_and_ceiling_are_side_by_side() -> None:
    found = plan_model(
        header_of(LLAMA_8B), find_device("h200"), LoadOptions(1024, users=64), name="llama", expectation=RATES
    )
    rows = {line.split("  ")[0]: line.split("  ")[1:] for line in format_plan(found).splitlines()}
    assert [cell.strip() for cell in rows["SPEED"] if cell] == ["AT MOST", "EXPECTED"]
    together = [cell.strip() for cell in rows["all users together"] if cell]
    assert [cell.split(" of ")[1] for cell in together] == ["64", "8"]  # the engine answers so many at once
    assert "expected from 123 answers of this machine" in rows


def test_rows_of_different_contexts_are_marked_incomparable() -> None:
    of_each, of_one = (
        format_plan(plan_model(header_of(LLAMA_8B), find_device("4090"), wish, name="llama"))
        for wish in (LoadOptions(), LoadOptions(1024))
    )
    assert "each row's own context" in of_each
    assert "each row's own context" not in of_one
