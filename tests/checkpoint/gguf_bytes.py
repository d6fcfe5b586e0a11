"""GGUF files written byte by byte, so that a test can corrupt any of them."""

import struct
from collections.abc import Iterable
from typing import Any

KINDS = {"u8": 0, "u32": 4, "f32": 6, "bool": 7, "text": 8, "list": 9, "u64": 10}
PACK = {"u8": "B", "u32": "I", "f32": "f", "bool": "B", "u64": "Q"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(kind: str, content: Any) -> bytes:
    return text(content) if kind == "text" else struct.pack(f"<{PACK[kind]}", content)


def key(name: str | bytes, kind: str, content: Any) -> bytes:
    return text(name) + struct.pack("<I", KINDS[kind]) + value(kind, content)


def array(name: str, kind: int, count: int, content: bytes) -> bytes:
    return text(name) + struct.pack("<IIQ", KINDS["list"], kind, count) + content


def tensor(
    name: str | bytes, shape: tuple[int, ...], kind: int, offset: int, dimensions: int | None = None
) -> bytes:
    """`shape`: innermost first, like the file."""
    count = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset)


def file(
    keys: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    content: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """`counts`: of tensors and keys, if the header should declare wrong ones."""
    keys, tensors = list(keys), list(tensors)
    stated = counts or (len(tensors), len(keys))
    header = magic + struct.pack("<IQQ", version, *stated) + b"".join(keys) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + content
