"""The kinds of tokenizers that GGUF, SentencePiece and tekken files describe, built in the Rust library.

Knows nothing of files, nor of tokens put around a text.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece

from localllm.errors import UnsupportedModel
from localllm.text.merges import derive_merges
from localllm.text.pretokenizers import PreTokenizer
from localllm.text.vocabulary import MARKUP_TYPES, UNENCODABLE, UNMERGED_TYPES, TokenType, Vocabulary

SPACE = "▁"
MIN_TABLE_BYTES = 256 * 4  # bytes of the table's first level: an entry for each byte

Merges = Iterable[tuple[str, str]]


@dataclass(frozen=True)
class SpaceNormalization:
    """What SentencePiece does to a text before it is tokenized."""

    add_prefix_space: bool = True
    """A space is put before it, and before what follows an added token; decoding takes off the first."""

    collapse_spaces: bool = False
    """Runs of spaces count as one, and those around the text as none."""

    precompiled_charsmap: bytes = b""
    """A compiled table of what stands for what, as it is in files. The library looks up whole graphemes, as in
    the tokenizer.json editions: a mark on a replaced character may be lost, which SentencePiece keeps."""

    def __post_init__(self):
        """Raises ValueError for a table that is none: from one the library takes sizes unchecked."""
        size = int.from_bytes(self.precompiled_charsmap[:4], "little")
        if self.precompiled_charsmap and (
            size % 4 or not MIN_TABLE_BYTES <= size <= len(self.precompiled_charsmap) - 4
        ):
            raise ValueError(f"its table of characters has {len(self.precompiled_charsmap)} bytes and says {size}")


def build_byte_level_bpe(
    vocabulary: Vocabulary, merges: Merges, pre_tokenizer: PreTokenizer, unknown_token: str | None
) -> tokenizers.Tokenizer:
    """BPE over the bytes of words, each byte written as a character of GPT-2's alphabet."""
    ids, unknown_token = _ids_and_unknown(vocabulary, unknown_token, byte_alphabet().values())
    model = BPE(ids, _first(merges), unk_token=unknown_token, ignore_merges=pre_tokenizer.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    split = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def find_byte_aliases(vocabulary: Vocabulary) -> dict[int, tuple[int, ...]]:
    """The bytes of added tokens that the library would decode as if each letter were one: DeepSeek adds `ù`."""
    alphabet = byte_alphabet()
    letters = {letter for letter in alphabet.values() if not letter.isascii()}
    found = {}
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == TokenType.USER_DEFINED and letters & set(token) and set(token) <= set(alphabet.values()):
            ids = [vocabulary.ids.get(alphabet[byte]) for byte in token.encode()]
            if None not in ids:
                found[i] = tuple(ids)
    return found


def byte_alphabet() -> dict[int, str]:
    """GPT-2's character for each byte: the visible ones of Latin-1 stand for themselves."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    visible = sorted(range(256), key=lambda byte: (chr(byte) not in letters, byte))
    return dict(zip(visible, letters, strict=True))


def build_score_bpe(
    vocabulary: Vocabulary, unknown: str | None, spacing: SpaceNormalization
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE, whose merges follow from the scores of the tokens."""
    entries = zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
    scored = {token: score for token, kind, score in entries if kind not in UNMERGED_TYPES}
    merges = derive_merges(((-score, token) for token, score in scored.items()), scored)
    return build_character_bpe(vocabulary, merges, unknown, spacing)


def build_character_bpe(
    vocabulary: Vocabulary, merges: Merges, unknown: str | None, spacing: SpaceNormalization
) -> tokenizers.Tokenizer:
    """BPE over characters, spaces among them; what the vocabulary lacks is written as bytes, else as unknown."""
    ids, unknown = _ids_and_unknown(vocabulary, unknown, (f"<0x{byte:02X}>" for byte in range(256)))
    model = BPE(ids, _first(merges), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    return _with_spaces(tokenizers.Tokenizer(model), spacing)


def build_unigram(vocabulary: Vocabulary, unknown_id: int, spacing: SpaceNormalization) -> tokenizers.Tokenizer:
    """SentencePiece's unigram: the tokens of the highest sum of scores."""
    if not all(vocabulary.tokens):
        raise UnsupportedModel("a unigram vocabulary with an empty token does not run", "fetch another edition")
    kinds, scores = vocabulary.types, vocabulary.scores
    written = [score for score, kind in zip(scores, kinds, strict=True) if kind not in UNMERGED_TYPES]
    least = min(written, default=0.0)  # a token that no text becomes shall not win, nor shift the unknown's score
    pieces = [
        (token, least if kind in UNMERGED_TYPES else score)
        for token, kind, score in zip(vocabulary.tokens, kinds, scores, strict=True)
    ]
    return _with_spaces(tokenizers.Tokenizer(Unigram(pieces, unknown_id, byte_fallback=True)), spacing)


def build_word_piece(vocabulary: Vocabulary, unknown_token: str) -> tokenizers.Tokenizer:
    """BERT's: the longest pieces of each word from the left. GGUF marks those that begin a word, not those that go
    on, and says nothing of letters: a vocabulary without capitals has lost them, and accents with them."""
    pieces = [
        token if kind in MARKUP_TYPES or is_bracketed(token) else token[1:] if token[:1] == SPACE else f"##{token}"
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    ids = dict(zip(reversed(pieces), range(len(pieces) - 1, -1, -1), strict=True))
    cased = any(any("A" <= c <= "Z" for c in piece) and not is_bracketed(piece) for piece in pieces)
    backend = tokenizers.Tokenizer(WordPiece(ids, unk_token=unknown_token))
    backend.normalizer = normalizers.BertNormalizer(lowercase=not cased, strip_accents=not cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def is_bracketed(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def _ids_and_unknown(
    vocabulary: Vocabulary, unknown: str | None, needed: Iterable[str]
) -> tuple[dict[str, int], str | None]:
    """Ids by token. Without an unknown token the library would drop what a vocabulary that lacks a needed token
    cannot write: there it becomes UNWRITABLE."""
    ids = vocabulary.ids
    if unknown is not None or ids.keys() >= set(needed):
        return ids, unknown
    return {**ids, UNENCODABLE: len(vocabulary.tokens)}, UNENCODABLE


def _first(merges: Merges) -> list[tuple[str, str]]:
    """Of equal merges the first counts, as in llama.cpp; the library would take the last."""
    return list(dict.fromkeys(merges))


def _with_spaces(backend: tokenizers.Tokenizer, spacing: SpaceNormalization) -> tokenizers.Tokenizer:
    steps: list[normalizers.Normalizer] = []
    if spacing.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spacing.precompiled_charsmap))
    if spacing.collapse_spaces:
        steps.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z| +(?= )"), ""))
    if spacing.add_prefix_space:
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if spacing.add_prefix_space else []
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*to_text, *after])
    return backend
