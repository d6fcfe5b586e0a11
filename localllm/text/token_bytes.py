"""What each token of a vocabulary adds to a text, as bytes: a token may be half a character.

Does token by token what a decoder of the Rust library does to all of them; knows nothing of who asks.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import decoders

from localllm.errors import UnsupportedModel
from localllm.text.backends import SPACE, byte_alphabet

SPACE_DECODERS = ("Replace", "Metaspace")  # write SPACE as a space
TEXT_EDGE_DECODERS = ("Fuse", "Strip")  # change its two ends alone


def token_bytes(tokens: Iterable[str | None], decoder: decoders.Decoder | None) -> list[bytes]:
    """Of each token as its file spells it, b"" for None. Raises UnsupportedModel for an unknown decoder."""
    described: Any = decoder.__getstate__() if decoder else b'{"type": "none at all"}'
    steps = list(_steps(json.loads(described)))
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return [b"" if token is None else _of_alphabet(token) for token in tokens]
    replaced = [step["pattern"] for step in steps if step["type"] == "Replace"]
    if kinds <= {*SPACE_DECODERS, *TEXT_EDGE_DECODERS, "ByteFallback"} and replaced in ([], [{"String": SPACE}]):
        in_bytes = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if "ByteFallback" in kinds else {}
        return [b"" if t is None else in_bytes.get(t) or t.replace(SPACE, " ").encode() for t in tokens]
    raise UnsupportedModel(
        f"the decoder of this tokenizer ({', '.join(sorted(kinds))}) tells no bytes of tokens",
        "ask without a schema or grammar",
    )


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _steps(part)
    else:
        yield decoder


_BYTES = {ord(letter): byte for byte, letter in byte_alphabet().items()}


def _of_alphabet(token: str) -> bytes:
    """As the library: a token of which one letter is not of the alphabet is a text."""
    written = token.translate(_BYTES)
    return written.encode("latin-1") if all(ord(letter) in _BYTES for letter in token) else token.encode()
