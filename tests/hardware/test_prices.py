"""Rental prices: the shipped table, and a user's own."""

import datetime
from pathlib import Path

import pytest

from localllm.errors import UsageError
from localllm.hardware.catalog import device_names
from localllm.hardware.prices import LIST_PRICES, RentalPrice, find_price, read_prices


def test_list_prices_are_dated_and_name_their_source() -> None:
    prices = read_prices(LIST_PRICES)
    assert prices.keys() <= set(device_names())
    for name, price in prices.items():
        assert 0.05 < price.per_hour < 20 and price.currency == "USD", name
        assert price.source and "." in price.source and price.date
        assert datetime.date(2026, 1, 1) <= price.date
    assert "replace them" in LIST_PRICES.read_text()


def test_names_as_drivers_spell_them() -> None:
    price = find_price("NVIDIA H100 80GB HBM3")
    assert price and price == find_price("h100")
    assert find_price("AMD EPYC") is None


def test_prices_of_a_user(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[devices."AMD EPYC"]\nper_hour = 1\n[devices.4090]\nper_hour = 0.5\nsource = "ours"\n')
    assert find_price("amd epyc", file) == RentalPrice(1.0)
    own = find_price("NVIDIA GeForce RTX 4090", file)
    assert own and own.describe() == "0.5 per hour (ours)"
    assert find_price("h100", file) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("devices = 1", "no table of devices"),
        ("[devices", "not valid TOML"),
        ("[devices.h100]\nper_hour = 0", "the price of h100"),
        ('[devices.h100]\nper_hour = "2"', "the price of h100"),
        ("[devices]\nh100 = 2", "the price of h100"),
        ("[devices.h100]\nper_hour = nan", "the price of h100"),
        ('[devices.h100]\nper_hour = 2\ndate = "yesterday"', "the price of h100"),
    ],
)
def test_invalid_prices(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        find_price("h100", file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        find_price("h100", tmp_path / "none.toml")
