"""Single tokens as log probabilities name them: a text and its bytes."""

from collections.abc import Sequence
from typing import Protocol

from localllm.errors import UnsupportedModel


class TokenDecoder(Protocol):
    """What is needed of a tokenizer."""

    special_ids: dict[int, str]

    @property
    def vocab_size(self) -> int: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...
    def token_bytes(self, count: int) -> list[bytes]: ...


class TokenTexts:
    """The tokens of one tokenizer; their bytes are asked for once."""

    def __init__(self, tokenizer: TokenDecoder):
        self.tokenizer = tokenizer
        self.bytes: list[bytes] | None = []  # None: the tokenizer's decoder does not say

    def __call__(self, token: int) -> tuple[str, bytes | None]:
        """The text amid others, half a character as `bytes:\\xe2`; None of bytes that are not known."""
        if self.bytes is not None and token >= len(self.bytes):
            try:
                self.bytes = self.tokenizer.token_bytes(max(token + 1, self.tokenizer.vocab_size))
            except UnsupportedModel:
                self.bytes = None
        if self.bytes is None:
            return self.tokenizer.decode([token], skip_special=False), None
        raw = self.bytes[token]
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def character_count(self, token: int) -> int:
        """How many begin in the token; none in one that texts are told without."""
        text, raw = self(token)
        if token in self.tokenizer.special_ids:
            return 0
        return len(text) if raw is None else sum(byte & 0xC0 != 0x80 for byte in raw)
