"""Prices of devices per hour: list prices in `prices.toml`, which a file of the user replaces.

Imports no torch, like `catalog.py`.
"""

import datetime
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import UsageError
from localllm.hardware.catalog import find_device

LIST_PRICES = Path(__file__).with_name("prices.toml")
MAX_FILE_BYTES = 1_000_000
REMEDY = "write it like localllm/hardware/prices.toml"


@dataclass(frozen=True)
class RentalPrice:
    """The price of one device."""

    per_hour: float
    currency: str = ""
    source: str | None = None
    date: datetime.date | None = None  # when it was read

    def describe(self) -> str:
        """Return the price with its origin, so that it is not mistaken for a current offer."""
        amount = f"{self.per_hour:g} {self.currency}".strip() + " per hour"
        month = f"list price of {self.date:%B %Y}" if self.date else ""
        origin = ", ".join(filter(None, (self.source, month)))
        return f"{amount} ({origin})" if origin else amount


def find_price(device: str, file: Path | None = None) -> RentalPrice | None:
    """Return the price of a device, by its name in the catalogue or as its driver reports it; None if there is
    none.

    file: replaces the list prices. Raises UsageError if it is invalid.
    """
    return read_prices(file or LIST_PRICES).get(canonical_name(device))


def read_prices(file: Path) -> dict[str, RentalPrice]:
    """Return the prices of a file by canonical name. Raises UsageError."""
    try:
        with file.open("rb") as stream:
            content = tomllib.loads(stream.read(MAX_FILE_BYTES).decode())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "use a readable file") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise UsageError(f"{file} is not valid TOML: {error}", REMEDY) from None
    currency, devices = content.get("currency", ""), content.get("devices")
    if not isinstance(currency, str) or not isinstance(devices, dict):
        raise UsageError(f"{file} has no table of devices, or a currency that is no text", REMEDY)
    return {canonical_name(name): parse_price(file, name, fields, currency) for name, fields in devices.items()}


def parse_price(file: Path, name: str, fields: Any, currency: str) -> RentalPrice:
    fields = fields if isinstance(fields, dict) else {}
    per_hour, source, date = fields.get("per_hour"), fields.get("source"), fields.get("date")
    is_price = isinstance(per_hour, int | float) and per_hour is not True and 0 < per_hour < math.inf
    is_text = source is None or isinstance(source, str)
    if not is_price or not is_text or not (date is None or type(date) is datetime.date):
        raise UsageError(f"the price of {name} in {file} is not valid", f"give per_hour above 0; {REMEDY}")
    return RentalPrice(float(per_hour), currency, source, date)


def canonical_name(device: str) -> str:
    """Return the name in the catalogue; in lower case for a device that is not in it."""
    try:
        return find_device(device).name
    except UsageError:
        return device.strip().lower()
