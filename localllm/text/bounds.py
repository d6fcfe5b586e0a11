"""Bounds on tokenizers and texts, checked before the Rust library gets either.

The library has no limits of its own, and ends the process when memory runs out. The steps that lengthen texts
(normalizers, decoders, post-processors) are described as JSON, from which their largest growth follows; a
tokenizer beyond these bounds is rejected. Regular expressions need no bound: Oniguruma, which runs them, rejects
deep nesting and gives up a match after 10 million steps, which raises an exception here.
"""

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel

from localllm.errors import UnsupportedModel, UsageError
from localllm.formatting import format_bytes

# Maximum bytes per byte of text. Of published tokenizers ALBERT's has the largest growth, 1,089: NFKD, lower case,
# a table of characters and a replacement, each counted with its rarest character.
MAX_GROWTH = 4096
MAX_STEPS = 64  # of one kind; published tokenizers have fewer than ten
MAX_ADDED_AROUND = 1024  # tokens that a post-processor puts around a text
MAX_PATTERN_CHARS = 100_000
MAX_NORMALIZED_BYTES = 32 * 2**20  # of one text; the library keeps 17 bytes for each
PIECE_CHARS = 2048  # of a text are normalized at a time to measure it: 140 MB at the largest growth
SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
STEP_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
# In UTF-8, Unicode 15: a ligature of 3 bytes becomes 33 by NFKC and NFKD, a letter of 2 bytes becomes 6 by NFC and
# NFD, and 3 in lower case.
GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 1.5, "BertNormalizer": 8, "ByteLevel": 2}

NO_NUMBER = re.compile(rb"\s*:\s*[^\s\d]")
ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")  # a name may be spelled with it
NAME_AND_COLON = re.compile(r'[\s,{]*("(?:[^"\\]|\\.)*")\s*:\s*')
LETTERS_AND_DIGITS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
NOT_LETTERS_OR_DIGITS = bytes(set(range(256)) - set(LETTERS_AND_DIGITS))
MAX_COMPOSED_CHARACTERS = 4  # that become one: Unicode's FAQ on normalization, for canonical decompositions
COMPOSING_NORMALIZERS = ("NFC", "NFKC")
# Normalizers and pre-tokenizers that drop no character.
LOSSLESS_NORMALIZERS = ("Prepend", "NFD", "NFKD", "Lowercase", *COMPOSING_NORMALIZERS)
LOSSLESS_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
SPLITTING_PRE_TOKENIZERS = ("Split", "Punctuation")  # these may drop characters


def read_sections(content: bytes) -> dict[str, Any]:
    """Return all of a `tokenizer.json` but its model, which is nearly all of the file and is not parsed if no
    section follows it.

    Raises ValueError for invalid JSON, or a section that occurs twice.
    """
    text = content.decode()
    sections: dict[str, Any] = {}
    position = 0
    while named := NAME_AND_COLON.match(text, position):
        name = json.loads(named[1])
        if name == "model" and not _sections_follow(content, len(text[: named.end()].encode())):
            return sections
        value, position = json.JSONDecoder().raw_decode(text, named.end())
        if name in sections:
            raise ValueError(f"it has {name} twice")
        sections[name] = value
    return sections


def _sections_follow(content: bytes, position: int) -> bool:
    """Return whether a section may follow, judged by its name: a word of a vocabulary is followed by a number."""
    for name in ("model", "added_tokens", *SECTIONS):
        quoted, start = f'"{name}"'.encode(), position
        while (start := content.find(quoted, start) + len(quoted)) >= len(quoted):
            if NO_NUMBER.match(content, start):
                return True
    return content.find(b"\\u00", position) >= 0 and ESCAPED_LETTER.search(content, position) is not None


def check_sections(sections: Mapping[str, Any], source: str) -> None:
    """Raise UnsupportedModel for a tokenizer beyond the bounds. source: the file, for the message.

    Values of a wrong type are left to the library, which rejects them.
    """
    for name in SECTIONS:
        steps = list(_steps(sections.get(name)))
        if len(steps) > MAX_STEPS:
            _refuse(source, f"its {name} has {len(steps)} steps")
        check_growth(_growth(steps), source)
        if any(len(pattern) > MAX_PATTERN_CHARS for step in steps for pattern in _patterns(step)):
            _refuse(source, f"its {name} has a pattern of more than {MAX_PATTERN_CHARS} characters")
    added = sum(map(_added_around, _steps(sections.get("post_processor"))))
    if added > MAX_ADDED_AROUND:
        _refuse(source, f"it puts {added} tokens around every text")
    growth = _growth(_steps(sections.get("normalizer")))
    for token in _list(sections.get("added_tokens")):
        if isinstance(token, Mapping) and _size(token.get("content")) * growth > MAX_NORMALIZED_BYTES:
            _refuse(source, f"it has an added token of {format_bytes(_size(token.get('content')))}")


def check_growth(growth: float, source: str) -> None:
    """Raise UnsupportedModel if a byte of text may become too many."""
    if growth > MAX_GROWTH:
        _refuse(source, f"it makes a text up to {growth:.2g} times as long")


def growth_of_normalizer(normalizer: Any) -> float:
    """Return the maximum number of bytes that a byte of text becomes. normalizer: of the library, or None."""
    return _growth(_steps(json.loads(normalizer.__getstate__()))) if normalizer else 1.0


def check_normalized_length(text: str, normalizer: Any, growth: float) -> None:
    """Raise UsageError for a text whose normalized form exceeds MAX_NORMALIZED_BYTES."""
    if len(text) * 4 * growth <= MAX_NORMALIZED_BYTES or len(text.encode()) * growth <= MAX_NORMALIZED_BYTES:
        return
    length = 0
    for start in range(0, len(text), PIECE_CHARS):
        length += len(normalizer.normalize_str(text[start : start + PIECE_CHARS]).encode())
        if length > MAX_NORMALIZED_BYTES:
            raise UsageError(
                f"this model's tokenizer makes more than {format_bytes(MAX_NORMALIZED_BYTES)} of the text",
                "send a shorter one, or use another model",
            )


def _steps(section: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a section in order; lists of steps may be nested."""
    if isinstance(section, Mapping):
        lists = [section[name] for name in STEP_LISTS if name in section]
        for step in [step for steps in lists for step in _list(steps)]:
            yield from _steps(step)
        if not lists:
            yield section


def _growth(steps: Any) -> float:
    return math.prod(map(_growth_of_step, steps))


def _growth_of_step(step: Mapping[str, Any]) -> float:
    step_type = step.get("type")
    if step_type == "Prepend":
        return 1 + _size(step.get("prepend"))
    if step_type == "Metaspace":
        return 1 + _size(step.get("replacement"))
    if step_type == "Precompiled":
        return _longest_entry(step.get("precompiled_charsmap"))
    if step_type == "Replace":
        pattern, content = step.get("pattern"), _size(step.get("content"))
        literal = _size(pattern.get("String")) if isinstance(pattern, Mapping) else _size(pattern)
        return max(1.0, content / literal) if literal else 1.0 + content  # a regular expression may match nothing
    return GROWTH.get(str(step_type), 1.0)


def _longest_entry(table: Any) -> float:
    """Return the length of the longest replacement in a compiled table of characters: behind its trie, each ends
    in a zero.
    """
    try:
        content = base64.b64decode(table)
    except (TypeError, ValueError):
        return 1.0
    entries = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
    return float(max(1, *map(len, entries)))


def _added_around(step: Mapping[str, Any]) -> int:
    """Return how many tokens a template adds to a text; a template that repeats the text counts as too many."""
    special = step.get("special_tokens")
    counts = {
        name: len(_list(token.get("ids"))) if isinstance(token, Mapping) else 1
        for name, token in (special.items() if isinstance(special, Mapping) else ())
    }
    pieces = [piece for name in ("single", "pair") for piece in _list(step.get(name))]
    texts = sum("Sequence" in piece for piece in pieces if isinstance(piece, Mapping))
    named = [piece.get("SpecialToken") for piece in pieces if isinstance(piece, Mapping)]
    tokens = sum(counts.get(str(each.get("id")), 1) for each in named if isinstance(each, Mapping))
    return tokens + (MAX_ADDED_AROUND + 1 if texts > 3 else 0)  # one in `single`, two in `pair`


def _patterns(step: Mapping[str, Any]) -> Iterator[str]:
    pattern = step.get("pattern")
    values = pattern.values() if isinstance(pattern, Mapping) else [pattern]
    yield from (value for value in values if isinstance(value, str))


def _size(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _refuse(source: str, why: str) -> None:
    raise UnsupportedModel(
        f"the tokenizer {source} is not safe to run: {why}", "fetch the model from its publisher"
    )


@dataclass(frozen=True)
class TokenCountBound:
    """A lower bound of a text's token count from its length alone, to reject far too long texts without
    tokenizing.

    A token represents at most as many characters as its spelling has. So a text has at least its length divided by
    the longest token's; the same holds for its letters and digits alone, of which the longest token has fewer,
    because whitespace and lines of dashes make the longest. If a tokenizer may drop characters, or combine any
    number of them to one token, no bound is known (None).
    """

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
