"""How few tokens a text can have, told by its length alone: a text that is far too long is not tokenized to be
refused.

A token stands for no more characters than it is written with. So a text of so many characters has no fewer tokens
than that over the longest one's; the same holds of its letters and digits alone, of which the longest token has
fewer: whitespace and lines of dashes make the longest. Where a tokenizer may drop something, or make one token of
any number of characters, nothing is told.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel

LETTERS_AND_DIGITS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
NOT_LETTERS_OR_DIGITS = bytes(set(range(256)) - set(LETTERS_AND_DIGITS))
MAX_COMPOSED_CHARACTERS = (
    4  # characters that become one at most: Unicode's FAQ on normalization, of canonical decompositions
)
COMPOSING_NORMALIZERS = ("NFC", "NFKC")
LOSSLESS_NORMALIZERS = (
    "Prepend",
    "NFD",
    "NFKD",
    "Lowercase",
    *COMPOSING_NORMALIZERS,
)  # normalizers that drop no character
LOSSLESS_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")  # pre-tokenizers that drop none
SPLITTING_PRE_TOKENIZERS = ("Split", "Punctuation")  # those that may


@dataclass(frozen=True)
class TokenCountBound:
    """Of one tokenizer. None: nothing is known."""

    max_characters: int | None  # that one token may stand for
    max_letters: int | None  # ASCII letters and digits that one token may stand for
    composes: bool  # several characters may become one before they are looked up

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, tokens: list[str]) -> "TokenCountBound":
        """tokens: all of them as they are written, added ones among them. Takes a moment for each."""
        normalizers = flatten_steps(tokenizer.normalizer, "normalizers")
        splits = flatten_steps(tokenizer.pre_tokenizer, "pretokenizers")
        composes = any(part["type"] in COMPOSING_NORMALIZERS for part in normalizers)
        if not (
            all(map(is_lossless_normalizer, normalizers))
            and all(map(is_lossless_pre_tokenizer, splits))
            and covers_letters(tokenizer)
        ):
            return cls(None, None, composes)
        strips = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
        whole = not strips and covers_all_characters(
            tokenizer, any(part["type"] == "ByteLevel" for part in splits)
        )
        longest = max(map(len, tokens), default=0) if whole else None
        return cls(longest or None, max(map(count_letters, tokens), default=0) or None, composes)

    def min_tokens(self, text: str) -> int:
        """No way of writing the text has fewer; 0 where nothing is known."""
        strange = len(text) - len(text.encode("ascii", "ignore"))
        found = 0
        if self.max_characters:
            found = -(
                -len(text) // (self.max_characters * (MAX_COMPOSED_CHARACTERS if self.composes and strange else 1))
            )
        if self.max_letters:  # each that becomes part of a composed character takes one beyond ASCII
            found = max(found, -(-(count_letters(text) - strange * self.composes) // self.max_letters))
        return found


def count_letters(text: str) -> int:
    return len(text.encode("ascii", "ignore").translate(None, NOT_LETTERS_OR_DIGITS))


def flatten_steps(component: Any, name: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as tokenizer.json has it, one after the other."""
    left, found = [json.loads(component.__getstate__())] if component else [], []
    while left:
        part = left.pop()
        if part["type"] == "Sequence":
            left += part[name]
        else:
            found.append(part)
    return found


def is_lossless_normalizer(normalizer: dict[str, Any]) -> bool:
    """A space for another character is the one replacement there is."""
    if normalizer["type"] == "Replace":
        return normalizer["pattern"] == {"String": " "} and len(normalizer["content"]) > 0
    return normalizer["type"] in LOSSLESS_NORMALIZERS


def is_lossless_pre_tokenizer(split: dict[str, Any]) -> bool:
    return split["type"] in LOSSLESS_PRE_TOKENIZERS or (
        split["type"] in SPLITTING_PRE_TOKENIZERS and split["behavior"] != "Removed"
    )


def covers_letters(tokenizer: Tokenizer) -> bool:
    """Is a letter never a part of something unknown, of which any number may become one token?"""
    model = tokenizer.model
    if not isinstance(model, BPE | Unigram):
        return False
    affixes = isinstance(model, BPE) and (model.continuing_subword_prefix or model.end_of_word_suffix)
    return not affixes and all(model.token_to_id(letter) is not None for letter in LETTERS_AND_DIGITS.decode())


def covers_all_characters(tokenizer: Tokenizer, byte_level: bool) -> bool:
    """Does each character take a part of a token of its own, whichever it is?"""
    model: Any = tokenizer.model
    if byte_level and isinstance(model, BPE):
        needed = ByteLevel.alphabet()
    elif getattr(model, "byte_fallback", False):
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return isinstance(model, BPE) and model.unk_token is not None and not model.fuse_unk
    return all(model.token_to_id(each) is not None for each in needed)
