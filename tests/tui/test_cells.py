from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from localllm.tui.cells import cut, left, right


@given(st.text(), st.integers(0, 40))
def test_columns_are_as_wide_as_asked_whatever_stands_in_them(text, width):
    assert cell_len(left(text, width)) == cell_len(right(text, width)) == width
    assert cell_len(cut(text, width)) <= width
    assert not set(left(text, width)) & {"\n", "\t", "\x1b", "\r"}


def test_what_is_cut_ends_in_an_ellipsis():
    assert [cut("abcdef", 4), cut("abcd", 4), cut("日本語", 4)] == ["abc…", "abcd", "日…"]
