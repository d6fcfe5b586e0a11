from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from localllm.tui.drawing import align_left, align_right, truncate


@given(st.text(), st.integers(0, 40))
def test_columns_have_the_requested_width(text, width):
    assert cell_len(align_left(text, width)) == cell_len(align_right(text, width)) == width
    assert cell_len(truncate(text, width)) <= width
    assert not set(align_left(text, width)) & {"\n", "\t", "\x1b", "\r"}


def test_truncated_text_ends_in_an_ellipsis():
    assert [truncate("abcdef", 4), truncate("abcd", 4), truncate("日本語", 4)] == ["abc…", "abcd", "日…"]
