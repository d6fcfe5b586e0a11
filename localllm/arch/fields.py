"""Typed access to an untrusted configuration, with errors that name the missing or invalid field."""

from collections.abc import Mapping
from typing import Any, overload

from localllm.errors import DamagedModel

MAX_INT = 2**31  # no size of a model is larger; it also limits the work that a field can cause
MIN_FLOAT, MAX_FLOAT = 1e-38, 1e38  # range of float32
_REQUIRED: Any = object()


class ConfigFields:
    """The fields of `config.json`, or of an object in it. A null field counts as missing.

    Every method raises DamagedModel for a value of another type, and for a missing field without a default.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    @overload
    def size(self, name: str, default: int = ...) -> int: ...
    @overload
    def size(self, name: str, default: int | None) -> int | None: ...
    def size(self, name: str, default: Any = _REQUIRED) -> int | None:
        """Return an integer > 0."""
        value = self._get(name, default)
        if value is not default and not (type(value) is int and 0 < value < MAX_INT):
            raise self._wrong(name, "a positive whole number")
        return value

    def count(self, name: str, default: int = _REQUIRED) -> int:
        """Return an integer >= 0."""
        value = self._get(name, default)
        if not (type(value) is int and 0 <= value < MAX_INT):
            raise self._wrong(name, "a whole number")
        return value

    @overload
    def number(self, name: str, default: float = ...) -> float: ...
    @overload
    def number(self, name: str, default: float | None) -> float | None: ...
    def number(self, name: str, default: Any = _REQUIRED) -> float | None:
        """Return a number > 0 in the range of float32."""
        value = self._get(name, default)
        if value is None:
            return None
        if not is_number(value):
            raise self._wrong(name, "a number above 0")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers > 0 in the range of float32."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or not all(map(is_number, value)):
            raise self._wrong(name, "a list of numbers above 0")
        return tuple(map(float, value))

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def flags(self, name: str) -> list[bool]:
        """Return a list of booleans, which may be written as 0 and 1; empty if the field is missing."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(item in (0, 1) for item in value):
            raise self._wrong(name, "a list of true and false")
        return [bool(item) for item in value]

    def text(self, name: str, default: str = _REQUIRED) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of strings; empty if the field is missing."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of texts")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Return one or several token or layer ids; empty if the field is missing."""
        value = self._get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(number) is int and 0 <= number < MAX_INT for number in ids):
            raise self._wrong(name, "an id or a list of them")
        return tuple(ids)

    def section(self, name: str) -> "ConfigFields":
        """Return an object in this one; empty if the field is missing."""
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object")
        return ConfigFields(value)

    def _get(self, name: str, default: Any) -> Any:
        if self.has(name):
            return self.values[name]
        if default is _REQUIRED:
            raise DamagedModel(f"config.json lacks {name}", "fetch the model again")
        return default

    def _wrong(self, name: str, expected: str) -> DamagedModel:
        shown = repr(self.values[name])[:60]
        return DamagedModel(f"{name} in config.json is {shown}, not {expected}", "fetch the model again")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and value is not True and MIN_FLOAT <= value <= MAX_FLOAT
