"""Single tokens as log probabilities name them: a text and its bytes."""

import re
from collections.abc import Sequence
from typing import Protocol

from localllm.text.backends import byte_alphabet

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte as SentencePiece spells it
_REPLACEMENT = "\ufffd"


class Decoding(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...
    def token(self, index: int) -> str | None: ...


class TokenTexts:
    """Looked up once each: log probabilities name the same tokens again and again."""

    def __init__(self, tokenizer: Decoding):
        self.tokenizer = tokenizer
        self.bytes_of = {letter: byte for byte, letter in byte_alphabet().items()}
        self.known: dict[int, tuple[str, bytes | None]] = {}

    def __call__(self, token: int) -> tuple[str, bytes | None]:
        """The text as it stands amid others, half a character as `bytes:\\xe2`; None of unknown bytes."""
        if token not in self.known:
            self.known[token] = self._read(token)
        return self.known[token]

    def _read(self, token: int) -> tuple[str, bytes | None]:
        # Twice, because decoders take a space from the first token of a text.
        alone, twice = (self.tokenizer.decode([token] * count, skip_special=False) for count in (1, 2))
        text = twice.removeprefix(alone)
        if _REPLACEMENT not in text:
            return text, text.encode()
        spelled = self.tokenizer.token(token) or ""
        if byte := _BYTE.fullmatch(spelled):
            raw = bytes.fromhex(byte[1])
        elif spelled and all(letter in self.bytes_of for letter in spelled):
            raw = bytes(self.bytes_of[letter] for letter in spelled)
        else:
            return text, None
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw
