"""The fields of a protocol buffer message, bounded by its bytes. Knows nothing of any schema."""

import struct
from collections.abc import Iterator

FieldValue = int | float | bytes


def read_fields(message: memoryview) -> Iterator[tuple[int, FieldValue]]:
    """Number and value of each field: an int, a 32-bit float, or the bytes of a string or message within.

    Raises ValueError where the bytes are no message. Groups and 64-bit fields are in no schema read here.
    Source: protobuf.dev/programming-guides/encoding.
    """
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        wire = tag & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield tag >> 3, value
        elif wire == 2:
            size, place = _varint(message, place)
            place += size
            yield tag >> 3, bytes(_within(message, place - size, place))
        elif wire == 5:
            place += 4
            yield tag >> 3, struct.unpack("<f", _within(message, place - 4, place))[0]
        else:
            raise ValueError(f"a field of wire type {wire} at byte {place}")


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:  # ten bytes hold 64 bits
        byte = _within(message, place, place + 1)[0]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
    raise ValueError(f"a number of more than ten bytes at byte {place}")


def _within(message: memoryview, begin: int, end: int) -> memoryview:
    if end > len(message):
        raise ValueError(f"{end - begin} bytes at byte {begin} of {len(message)}")
    return message[begin:end]
