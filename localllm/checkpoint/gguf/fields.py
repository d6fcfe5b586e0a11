"""Typed access to GGUF metadata below its architecture's prefix, with errors that name the missing or invalid
key.
"""

import math
import struct
from typing import Any

from localllm.arch.fields import MAX_INT
from localllm.checkpoint.gguf.header import GGUFHeader, GGUFTensor
from localllm.errors import DamagedModel

MAX_FACTORS = 2**16  # values in a rope table
_REQUIRED: Any = object()


class GGUFFields:
    """Every method raises DamagedModel for a value of another type, and for a missing key without a default."""

    def __init__(self, header: GGUFHeader):
        self.header = header
        self.architecture = self.text("general.architecture", absolute=True)

    def size(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return an integer > 0. A list with equal values for all layers is accepted."""
        return self._number(key, default, 1)

    def count(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return an integer >= 0."""
        return self._number(key, default, 0)

    def _number(self, key: str, default: Any, minimum: int) -> Any:
        value = self._get(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is not default and not (type(value) is int and minimum <= value < MAX_INT):
            raise self._wrong(key, value, "a positive whole number" if minimum else "a whole number")
        return value

    def sizes(self, key: str, length: int) -> list[int]:
        """Return an integer >= 0 for each layer; a single integer applies to all."""
        value = self._get(key)
        value = [value] * length if type(value) is int else value
        is_valid = isinstance(value, list) and all(type(v) is int and 0 <= v < MAX_INT for v in value)
        if not is_valid or len(value) < length:
            raise self._wrong(key, value, f"a whole number or {length} of them")
        return value[:length]

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a finite number > 0."""
        value = self._get(key, default)
        if value is not default and not (type(value) in (int, float) and 0 < value < math.inf):
            raise self._wrong(key, value, "a number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str = _REQUIRED, absolute: bool = False) -> str:
        value = self._get(key, default, absolute)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def flags(self, key: str, length: int) -> list[bool] | None:
        """Return a boolean for each layer; None if the key is missing or not a list."""
        value = self._get(key, None)
        if not isinstance(value, list):
            return None
        if len(value) < length or not all(v in (0, 1) for v in value[:length]):
            raise self._wrong(key, value, f"true or false for {length} layers")
        return [bool(v) for v in value[:length]]

    def has_tensor(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def read_factors(self, tensor: str) -> list[float] | None:
        """Return the values of a small float32 tensor; None if it is missing."""
        entry = self.header.tensors.get(tensor)
        if entry is None:
            return None
        if entry.format != "f32" or entry.elements > MAX_FACTORS:
            raise DamagedModel(f"{tensor} in {entry.file} is not a table of factors", "fetch the model again")
        return read_float32(entry)

    def _get(self, key: str, default: Any = _REQUIRED, absolute: bool = False) -> Any:
        full = key if absolute else f"{self.architecture}.{key}"
        if full in self.header.metadata:
            return self.header.metadata[full]
        if default is _REQUIRED:
            raise DamagedModel(f"{self.header.files[0]} lacks the key {full}", "fetch the model again")
        return default

    def _wrong(self, key: str, value: Any, expected: str) -> DamagedModel:
        return DamagedModel(
            f"{key} in {self.header.files[0]} is {repr(value)[:60]}, not {expected}", "fetch it again"
        )


def read_float32(tensor: GGUFTensor) -> list[float]:
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.elements}f", stream.read(tensor.nbytes)))
