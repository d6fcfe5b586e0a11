import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from localllm.tui.drawing import (
    align_left,
    align_right,
    bar,
    bar_levels,
    round_up_scale,
    sparkline,
    truncate,
    vertical_bars,
)


@given(st.text(), st.integers(0, 40))
def test_columns_have_the_requested_width(text, width):
    assert cell_len(align_left(text, width)) == cell_len(align_right(text, width)) == width
    assert cell_len(truncate(text, width)) <= width
    assert not set(align_left(text, width)) & {"\n", "\t", "\x1b", "\r"}


def test_truncated_text_ends_in_an_ellipsis():
    assert [truncate("abcdef", 4), truncate("abcd", 4), truncate("日本語", 4)] == ["abc…", "abcd", "日…"]


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0, "····"), (1e-6, "▏···"), (0.5, "██··"), (0.53, "██▏·"), (1, "████"), (7, "████"), (-1, "····")],
)
def test_a_bar_is_as_long_as_its_share(share: float, drawn: str) -> None:
    assert bar(share, 4, "·") == drawn


def test_positive_values_are_visible_and_excess_is_clipped() -> None:
    assert bar_levels([0, 1e-9, 0.5, 1, 9], 1) == [0, 1, 4, 8, 8]
    assert bar_levels([1], 0) == [0]


def test_a_sparkline_shows_the_newest_at_the_right() -> None:
    assert sparkline([9, 1, 2, 4], 3, top=4).plain == "▂▄█"
    assert sparkline([4], 3, top=4).plain == "  █"
    assert sparkline([4], 0, top=4).plain == ""


def test_standing_bars_go_over_lines() -> None:
    assert vertical_bars([0, 1, 3, 4], 2, 4) == ["  ▄█", " ▄██"]


@pytest.mark.parametrize(
    ("value", "top"), [(1, 1), (1.2, 1.5), (16.1, 20), (0.0083, 0.01), (0, 1), (float("nan"), 1)]
)
def test_scales_end_with_round_numbers(value: float, top: float) -> None:
    assert round_up_scale(value) == pytest.approx(top)
