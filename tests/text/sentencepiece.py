"""SentencePiece models of a few pieces, byte for byte as the library writes them."""

import struct
from collections.abc import Iterable

UNIGRAM, BPE = 1, 2
Piece = tuple[str, float, int]


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def message(**values: int | float | bytes) -> bytes:
    """Encode fields by number: message(f1=b"a", f3=2)."""
    return b"".join(field(int(name[1:]), value) for name, value in values.items())


def model(
    pieces: Iterable[Piece], kind: int, *, dummy_prefix: int = 1, one_space: int = 0, table: bytes = b""
) -> bytes:
    pieces = list(pieces)
    fallback = int(any(type == 6 for _, _, type in pieces))
    written = b"".join(field(1, message(f1=text.encode(), f2=score, f3=type)) for text, score, type in pieces)
    spacing = message(f2=table, f3=dummy_prefix, f4=one_space)
    return written + message(f2=message(f3=kind, f35=fallback), f3=spacing)


SPECIAL: list[Piece] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
BYTES: list[Piece] = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
WORDS: list[Piece] = [
    (text, score, 1)
    for text, score in {
        **{"\u2581": -2.0, "a": -4.1, "b": -4.2, "t": -4.3, "h": -4.4, "e": -4.5, "1": -5.5},
        **{"ab": -3.5, "th": -3.1, "the": -3.3, "\u2581the": -3.4, "\u2581a": -3.7, "he": -3.05, "bab": -6.05},
    }.items()
] + [("<tool>", 0.0, 4)]
