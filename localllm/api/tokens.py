"""Text and bytes of single tokens, for log probabilities."""

from collections.abc import Sequence
from typing import Protocol

from localllm.errors import UnsupportedModel


class TokenDecoder(Protocol):
    """The part of a tokenizer that TokenTexts needs."""

    special_ids: dict[int, str]

    @property
    def vocab_size(self) -> int: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...
    def token_bytes(self, count: int) -> list[bytes]: ...


class TokenTexts:
    """Texts of one tokenizer's tokens. The bytes of all are computed once."""

    def __init__(self, tokenizer: TokenDecoder):
        self.tokenizer = tokenizer
        self.bytes: list[bytes] | None = []  # None if the tokenizer's decoder does not allow it

    def __call__(self, token: int) -> tuple[str, bytes | None]:
        """Text of a token within other text, an incomplete character as `bytes:\\xe2`; and its bytes, or None."""
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
        """Number of characters that start in the token; 0 for special tokens, which texts omit."""
        text, raw = self(token)
        if token in self.tokenizer.special_ids:
            return 0
        return len(text) if raw is None else sum(byte & 0xC0 != 0x80 for byte in raw)
