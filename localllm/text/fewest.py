"""A lower bound of a text's token count from its length alone, to reject far too long texts without tokenizing.

A token represents at most as many characters as its spelling has. So a text has at least its length divided by the
longest token's; the same holds for its letters and digits alone, of which the longest token has fewer, because
whitespace and lines of dashes make the longest. If a tokenizer may drop characters, or combine any number of them
to one token, no bound is known.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel

LETTERS_AND_DIGITS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
NOT_LETTERS_OR_DIGITS = bytes(set(range(256)) - set(LETTERS_AND_DIGITS))
MAX_COMPOSED_CHARACTERS = 4  # that become one: Unicode's FAQ on normalization, for canonical decompositions
COMPOSING_NORMALIZERS = ("NFC", "NFKC")
# Normalizers and pre-tokenizers that drop no character.
LOSSLESS_NORMALIZERS = ("Prepend", "NFD", "NFKD", "Lowercase", *COMPOSING_NORMALIZERS)
LOSSLESS_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
SPLITTING_PRE_TOKENIZERS = ("Split", "Punctuation")  # these may drop characters


@dataclass(frozen=True)
class TokenCountBound:
    """The bound for one tokenizer. None: unknown."""

    max_characters: int | None  # per token
    max_letters: int | None  # ASCII letters and digits per token
    composes: bool  # several characters may be composed to one first

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, tokens: list[str]) -> "TokenCountBound":
        """Compute the bound. tokens: spellings of all tokens, including added ones"""
        normalizers = flatten_steps(tokenizer.normalizer, "normalizers")
        pre_tokenizers = flatten_steps(tokenizer.pre_tokenizer, "pretokenizers")
        composes = any(part["type"] in COMPOSING_NORMALIZERS for part in normalizers)
        if not (
            all(map(is_lossless_normalizer, normalizers))
            and all(map(is_lossless_pre_tokenizer, pre_tokenizers))
            and covers_letters(tokenizer)
        ):
            return cls(None, None, composes)
        strips = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
        covers_all = not strips and covers_all_characters(
            tokenizer, any(part["type"] == "ByteLevel" for part in pre_tokenizers)
        )
        max_characters = max(map(len, tokens), default=0) if covers_all else None
        return cls(max_characters or None, max(map(count_letters, tokens), default=0) or None, composes)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the text's token count; 0 if unknown."""
        non_ascii = len(text) - len(text.encode("ascii", "ignore"))
        bound = 0
        if self.max_characters:
            bound = -(
                -len(text)
                // (self.max_characters * (MAX_COMPOSED_CHARACTERS if self.composes and non_ascii else 1))
            )
        if self.max_letters:  # each character composed from letters is not ASCII, and uses up at most one letter
            bound = max(bound, -(-(count_letters(text) - non_ascii * self.composes) // self.max_letters))
        return bound


def count_letters(text: str) -> int:
    return len(text.encode("ascii", "ignore").translate(None, NOT_LETTERS_OR_DIGITS))


def flatten_steps(component: Any, name: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer as in tokenizer.json."""
    remaining, steps = [json.loads(component.__getstate__())] if component else [], []
    while remaining:
        part = remaining.pop()
        if part["type"] == "Sequence":
            remaining += part[name]
        else:
            steps.append(part)
    return steps


def is_lossless_normalizer(normalizer: dict[str, Any]) -> bool:
    """Return whether the normalizer drops no character; the only accepted replacement is of spaces."""
    if normalizer["type"] == "Replace":
        return normalizer["pattern"] == {"String": " "} and len(normalizer["content"]) > 0
    return normalizer["type"] in LOSSLESS_NORMALIZERS


def is_lossless_pre_tokenizer(split: dict[str, Any]) -> bool:
    return split["type"] in LOSSLESS_PRE_TOKENIZERS or (
        split["type"] in SPLITTING_PRE_TOKENIZERS and split["behavior"] != "Removed"
    )


def covers_letters(tokenizer: Tokenizer) -> bool:
    """Return whether letters never belong to an unknown token, which may represent any number of them."""
    model = tokenizer.model
    if not isinstance(model, BPE | Unigram):
        return False
    affixes = isinstance(model, BPE) and (model.continuing_subword_prefix or model.end_of_word_suffix)
    return not affixes and all(model.token_to_id(letter) is not None for letter in LETTERS_AND_DIGITS.decode())


def covers_all_characters(tokenizer: Tokenizer, byte_level: bool) -> bool:
    """Return whether each character takes up a part of some token."""
    model: Any = tokenizer.model
    if byte_level and isinstance(model, BPE):
        needed = ByteLevel.alphabet()
    elif getattr(model, "byte_fallback", False):
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return isinstance(model, BPE) and model.unk_token is not None and not model.fuse_unk
    return all(model.token_to_id(token) is not None for token in needed)
