"""The tokens of a vocabulary as listed by GGUF and SentencePiece, and their registration in the Rust library.

Both formats use the same numbers for token types.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import processors

from localllm.files import damaged_file


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


MARKUP_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)
ADDED_TYPES = (*MARKUP_TYPES, TokenType.USER_DEFINED)  # matched before tokenization
UNMERGED_TYPES = (*MARKUP_TYPES, TokenType.BYTE)
UNENCODABLE = "\0unwritable"  # an extra token for what a vocabulary without unknown token cannot encode
MAX_TOKEN_CHARACTERS = 1024  # the longest real ones are runs of 512 spaces
MAX_TOTAL_CHARACTERS = 2**23  # of all tokens: four times those of the largest real vocabulary


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, with their types and scores.

    An empty token encodes nothing; among equal ones, the first is used.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    added_token_options: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """Options of `tokenizers.AddedToken` for some that are matched first: {"<|end|>": {"rstrip": True}}."""

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids by token, without the empty one."""
        last = len(self.tokens) - 1
        ids = dict(zip(reversed(self.tokens), range(last, -1, -1), strict=True))
        ids.pop("", None)
        return ids

    @cached_property
    def aliases(self) -> dict[int, tuple[int, ...]]:
        """The encoding id for each later id of an equal token."""
        return {i: (self.ids[token],) for i, token in enumerate(self.tokens) if token and self.ids[token] != i}

    def literal(self, token: int | None) -> str | None:
        """Return a token's spelling; None for None and for an empty token."""
        return (self.tokens[token] or None) if token is not None else None


@dataclass(frozen=True)
class TokenizerDescription:
    """A tokenizer as described by a file. aliases: ids that decode like others."""

    file: Path
    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    eos_ids: tuple[int, ...]
    aliases: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def check_vocabulary(vocabulary: Vocabulary, file: Path) -> Vocabulary:
    """Return the vocabulary. Raises DamagedModel if it is invalid or far larger than any real one."""
    tokens, types, scores = vocabulary.tokens, vocabulary.types, vocabulary.scores
    if not tokens:
        raise damaged_file(file, "its vocabulary is empty")
    if not len(tokens) == len(types) == len(scores):
        raise damaged_file(
            file, f"it has {len(tokens)} tokens, types for {len(types)} and scores for {len(scores)}"
        )
    if max(map(len, tokens)) > MAX_TOKEN_CHARACTERS or sum(map(len, tokens)) > MAX_TOTAL_CHARACTERS:
        raise damaged_file(file, "its tokens are longer than those of any vocabulary")
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        raise damaged_file(file, "it has tokens with lone surrogates") from None
    if not 0 <= min(types) <= max(types) <= max(TokenType):
        raise damaged_file(file, "it has tokens of a type that does not exist")
    if not all(map(math.isfinite, scores)):
        raise damaged_file(file, "it has scores that are not finite")
    return vocabulary


def register_added_tokens(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Register the tokens that are matched before tokenization, distinguishing markup."""
    markup: dict[str, tokenizers.AddedToken] = {}
    others: dict[str, tokenizers.AddedToken] = {}
    for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if token and token_type in ADDED_TYPES:
            options = {"normalized": False, **vocabulary.added_token_options.get(token, {})}
            (markup if token_type in MARKUP_TYPES else others)[token] = tokenizers.AddedToken(token, **options)
    backend.add_special_tokens(list(markup.values()))
    backend.add_tokens([added for token, added in others.items() if token not in markup])


def set_bos_eos(backend: tokenizers.Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """Add a token (literal and id) before, and one after, every text that is encoded with special tokens."""
    if bos or eos:
        names = [*(["begin"] if bos else []), "$A", *(["end"] if eos else [])]
        tokens = [
            {"id": name, "ids": [token[1]], "tokens": [token[0]]}
            for name, token in (("begin", bos), ("end", eos))
            if token
        ]
        backend.post_processor = processors.TemplateProcessing(single=names, special_tokens=tokens)
