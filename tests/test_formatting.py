import math

import pytest

from localllm.formatting import (
    format_bytes,
    format_columns,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    format_table,
    one_line,
    printable,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (1.5, "1.50 s"),
        (12.345, "12.3 s"),
        (0.0123, "12.3 ms"),
        (0.00012, "120 µs"),
        (599, "599 s"),
        (3600, "60.0 min"),
        (70920, "19.7 h"),
        (math.nan, "-"),
    ],
)
def test_seconds(value, text):
    assert format_seconds(value) == text


def test_values_that_round_to_a_thousand_use_the_next_unit():
    assert [format_count(v) for v in (999_885_952, 999_900, 999)] == ["1B", "1M", "999"]
    assert [format_bytes(v) for v in (999, 999_600, 999.6e6, 999.4e6)] == ["999 B", "1.00 MB", "1.00 GB", "999 MB"]
    assert [format_seconds(v) for v in (0.9997, 0.0009997)] == ["1.00 s", "1.00 ms"]
    assert [format_flops(v) for v in (999.7e9, 999e9)] == ["1.00 TFLOP/s", "999 GFLOP/s"]


def test_rates_sizes_and_counts():
    assert [format_rate(v) for v in (math.nan, 3.14159, 1234.5)] == ["-", "3.14 tokens/s", "1234 tokens/s"]
    assert [format_bytes(v) for v in (12, 1040000, 16.4e9, 2e12)] == ["12 B", "1.04 MB", "16.4 GB", "2.00 TB"]
    assert [format_count(v) for v in (12, 656_000, 135e6, 8.03e9)] == ["12", "656K", "135M", "8.03B"]


def test_cells_are_aligned_as_requested():
    rows = [("NAME", "COUNT", "STATE"), ("a", "1,000", "decode"), ("longer", "2", "-")]
    assert format_table(rows) == "NAME    COUNT  STATE\na       1,000  decode\nlonger  2      -"
    assert format_table(rows, "<>") == "NAME    COUNT  STATE\na       1,000  decode\nlonger      2  -"


def test_name_columns_are_wider():
    assert format_columns([("a", "1"), ("bc", "2")]) == "a    1\nbc   2"


def test_control_codes_are_made_visible():
    assert printable("a\x1b[2Jb\x7fc\x9bd\te\nf") == "a␛[2Jb␡c\ufffdd\te\nf"


def test_a_name_stays_in_its_line():
    assert one_line("a\nb\tc\r\u2028d\x1b]0;title\x07") == "a b c␍ d␛]0;title␇"
