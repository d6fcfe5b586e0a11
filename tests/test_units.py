import math

import pytest

from localllm.units import count, rate, seconds, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (1.5, "1.50 s"),
        (12.345, "12.3 s"),
        (0.0123, "12.3 ms"),
        (0.00012, "120 µs"),
        (3600, "3600 s"),
        (math.nan, "-"),
    ],
)
def test_seconds(value, text):
    assert seconds(value) == text


def test_rates_sizes_and_counts():
    assert [rate(v) for v in (math.nan, 3.14159, 1234.5)] == ["-", "3.14 tokens/s", "1234 tokens/s"]
    assert [size(v) for v in (12, 1040000, 16.4e9, 2e12)] == ["12 B", "1.04 MB", "16.4 GB", "2.00 TB"]
    assert [count(v) for v in (12, 656_000, 135e6, 8.03e9)] == ["12", "656K", "135M", "8.03B"]
