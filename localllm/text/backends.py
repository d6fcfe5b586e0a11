"""Builds tokenizers of GGUF, SentencePiece and tekken files with the Rust library.

Independent of files, and of tokens added around a text.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from operator import itemgetter

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece

from localllm.errors import UnsupportedModel
from localllm.text.pretokenizers import PreTokenizer
from localllm.text.vocabulary import MARKUP_TYPES, UNENCODABLE, UNMERGED_TYPES, TokenType, Vocabulary

SPACE = "▁"
MIN_TABLE_BYTES = 256 * 4  # size of the table's first level, with an entry for each byte
Merges = Iterable[tuple[str, str]]


@dataclass(frozen=True)
class SpaceNormalization:
    """SentencePiece's normalization of a text before tokenization."""

    add_prefix_space: bool = True
    """Prepend a space to the text, and to what follows an added token; decoding removes the first."""

    collapse_spaces: bool = False
    """Collapse runs of spaces, and strip those around the text."""

    precompiled_charsmap: bytes = b""
    """A compiled replacement table, as stored in files. The library looks up whole graphemes, like the
    tokenizer.json versions: a mark on a replaced character may be lost, unlike in SentencePiece."""

    def __post_init__(self):
        """Raise ValueError for an invalid table, whose sizes the library would not check."""
        size = int.from_bytes(self.precompiled_charsmap[:4], "little")
        if self.precompiled_charsmap and (
            size % 4 or not MIN_TABLE_BYTES <= size <= len(self.precompiled_charsmap) - 4
        ):
            raise ValueError(
                f"its table of characters has {len(self.precompiled_charsmap)} bytes, but states {size}"
            )


def build_byte_level_bpe(
    vocabulary: Vocabulary, merges: Merges, pre_tokenizer: PreTokenizer, unknown_token: str | None
) -> tokenizers.Tokenizer:
    """Build BPE over the bytes of words, each byte represented by a character of GPT-2's alphabet."""
    ids, unknown_token = _ids_and_unknown(vocabulary, unknown_token, byte_alphabet().values())
    model = BPE(ids, _first(merges), unk_token=unknown_token, ignore_merges=pre_tokenizer.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    split = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def find_byte_aliases(vocabulary: Vocabulary) -> dict[int, tuple[int, ...]]:
    """Return byte tokens for added tokens that the library would decode letter by letter: DeepSeek adds `ù`."""
    alphabet = byte_alphabet()
    letters = {letter for letter in alphabet.values() if not letter.isascii()}
    aliases = {}
    for i, (token, token_type) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if token_type == TokenType.USER_DEFINED and letters & set(token) and set(token) <= set(alphabet.values()):
            ids = [vocabulary.ids.get(alphabet[byte]) for byte in token.encode()]
            if None not in ids:
                aliases[i] = tuple(ids)
    return aliases


def byte_alphabet() -> dict[int, str]:
    """Return GPT-2's character for each byte; visible Latin-1 characters represent themselves."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    visible = sorted(range(256), key=lambda byte: (chr(byte) not in letters, byte))
    return dict(zip(visible, letters, strict=True))


def build_score_bpe(
    vocabulary: Vocabulary, unknown: str | None, spacing: SpaceNormalization
) -> tokenizers.Tokenizer:
    """Build SentencePiece's BPE, whose merges are derived from the scores of tokens."""
    entries = zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
    scores = {token: score for token, token_type, score in entries if token_type not in UNMERGED_TYPES}
    merges = derive_merges(((-score, token) for token, score in scores.items()), scores)
    return build_character_bpe(vocabulary, merges, unknown, spacing)


def build_character_bpe(
    vocabulary: Vocabulary, merges: Merges, unknown: str | None, spacing: SpaceNormalization
) -> tokenizers.Tokenizer:
    """Build BPE over characters including spaces; characters that the vocabulary lacks become bytes or unknown."""
    ids, unknown = _ids_and_unknown(vocabulary, unknown, (f"<0x{byte:02X}>" for byte in range(256)))
    model = BPE(ids, _first(merges), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    return _with_spaces(tokenizers.Tokenizer(model), spacing)


def build_unigram(vocabulary: Vocabulary, unknown_id: int, spacing: SpaceNormalization) -> tokenizers.Tokenizer:
    """Build SentencePiece's unigram model: the tokens with the highest sum of scores."""
    if not all(vocabulary.tokens):
        raise UnsupportedModel(
            "a unigram vocabulary with an empty token is not supported", "use another version of the model"
        )
    types, scores = vocabulary.types, vocabulary.scores
    text_scores = [
        score for score, token_type in zip(scores, types, strict=True) if token_type not in UNMERGED_TYPES
    ]
    # A token that is never produced must neither win nor shift the unknown token's score.
    min_score = min(text_scores, default=0.0)
    pieces = [
        (token, min_score if token_type in UNMERGED_TYPES else score)
        for token, token_type, score in zip(vocabulary.tokens, types, scores, strict=True)
    ]
    return _with_spaces(tokenizers.Tokenizer(Unigram(pieces, unknown_id, byte_fallback=True)), spacing)


def build_word_piece(vocabulary: Vocabulary, unknown_token: str) -> tokenizers.Tokenizer:
    """Build BERT's WordPiece: the longest pieces of each word from the left.

    GGUF marks pieces that begin a word, rather than those that continue one, and does not state whether the model
    is cased: a vocabulary without capital letters is uncased, and strips accents.
    """
    pieces = [
        token
        if token_type in MARKUP_TYPES or is_bracketed(token)
        else token[1:]
        if token[:1] == SPACE
        else f"##{token}"
        for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
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
    """Return ids by token.

    Without an unknown token, the library would drop what a vocabulary lacking a needed token cannot encode: it
    becomes UNENCODABLE.
    """
    ids = vocabulary.ids
    if unknown is not None or ids.keys() >= set(needed):
        return ids, unknown
    return {**ids, UNENCODABLE: len(vocabulary.tokens)}, UNENCODABLE


def _first(merges: Merges) -> list[tuple[str, str]]:
    """Keep the first of equal merges, like llama.cpp; the library would use the last."""
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


def derive_merges(
    ranked_tokens: Iterable[tuple[float, str]], known_tokens: Container[str]
) -> list[tuple[str, str]]:
    """Return the merges of a BPE tokenizer whose file only orders its tokens: all pairs of known tokens that form
    a token.

    ranked_tokens: tokens with their ranks, SentencePiece scores or tiktoken ranks; the lowest rank is merged
    first. Both formats merge the leftmost of pairs with equal rank; the library ranks every pair, so pairs with
    equal rank are sorted by the length of their left part, which corresponds to merging from the left. Source:
    `SentencePieceExtractor` of transformers.
    """
    ranked = sorted(ranked_tokens, key=itemgetter(0))
    merges = [
        (rank, left, right)
        for rank, token in ranked
        for i in range(len(token) - 1, 0, -1)
        if (left := token[:i]) in known_tokens and (right := token[i:]) in known_tokens
    ]
    if len({rank for rank, _ in ranked}) < len(ranked):  # pairs of one token are sorted already
        merges.sort(key=lambda merge: (merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]
