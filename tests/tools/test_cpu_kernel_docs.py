"""The instruction counts of docs/kernels.md are those of the kernels."""

import pytest

from tools.cpu_kernel_docs import largest_block, main


@pytest.mark.slow
def test_the_page_has_the_counts_of_these_kernels() -> None:
    assert main(["--check"]) == 0


def test_the_largest_block_is_counted() -> None:
    assert largest_block("f:\n\tadd\n.LBB0_1:\n\t.p2align 4\n\t#APP\n\tmul\n\tadd\n\tjne\n.LBB0_2:\n\tret\n") == 3
