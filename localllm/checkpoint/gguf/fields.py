"""Typed reading of GGUF metadata under its architecture's prefix: what is missing or makes no sense is named."""

import math
import struct
from typing import Any

from localllm.arch.fields import MAX_INT
from localllm.checkpoint.gguf.cursor import GGUFTensor
from localllm.checkpoint.gguf.header import GGUFHeader
from localllm.errors import DamagedModel

MAX_FACTORS = 2**16  # of a rope table
_REQUIRED: Any = object()


class GGUFFields:
    """Every method raises DamagedModel for a value of another kind, and for a missing key without a default."""

    def __init__(self, header: GGUFHeader):
        self.header = header
        self.architecture = self.text("general.architecture", absolute=True)

    def size(self, key: str, default: Any = _REQUIRED) -> Any:
        """A whole number from 1. Where a list says the same for every layer, that."""
        return self._number(key, default, 1)

    def count(self, key: str, default: Any = _REQUIRED) -> Any:
        """A whole number from 0."""
        return self._number(key, default, 0)

    def _number(self, key: str, default: Any, least: int) -> Any:
        value = self._get(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is not default and not (type(value) is int and least <= value < MAX_INT):
            raise self._wrong(key, value, "a positive whole number" if least else "a whole number")
        return value

    def sizes(self, key: str, length: int) -> list[int]:
        """One whole number from 0 for each layer; a single one stands for all."""
        value = self._get(key)
        value = [value] * length if type(value) is int else value
        whole = isinstance(value, list) and all(type(v) is int and 0 <= v < MAX_INT for v in value)
        if not whole or len(value) < length:
            raise self._wrong(key, value, f"a whole number or {length} of them")
        return value[:length]

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A finite number above 0."""
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
        """One for each layer; None where the key is missing or holds no list."""
        value = self._get(key, None)
        if not isinstance(value, list):
            return None
        if len(value) < length or not all(v in (0, 1) for v in value[:length]):
            raise self._wrong(key, value, f"true or false for {length} layers")
        return [bool(v) for v in value[:length]]

    def has_tensor(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def read_factors(self, tensor: str) -> list[float] | None:
        """A small float32 tensor's values; None where it is missing."""
        found = self.header.tensors.get(tensor)
        if found is None:
            return None
        if found.format != "f32" or found.elements > MAX_FACTORS:
            raise DamagedModel(f"{tensor} in {found.file} is no table of factors", "fetch the model again")
        return read_float32(found)

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
