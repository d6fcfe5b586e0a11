"""The tokens of a vocabulary as GGUF and SentencePiece list them, and how they reach the Rust library.

Both number the kinds of tokens alike. Knows nothing of the files they come from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import processors

from localllm.files import damaged


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


MARKUP = (TokenType.CONTROL, TokenType.UNKNOWN)
MATCHED_FIRST = (*MARKUP, TokenType.USER_DEFINED)  # found in a text before it is tokenized
NEVER_MERGED = (*MARKUP, TokenType.BYTE)
UNWRITABLE = "\0unwritable"  # stands beyond the vocabulary for what it cannot write, where it has no unknown token
LONGEST_TOKEN = 1024  # characters; the longest real ones are runs of 512 spaces
MOST_CHARACTERS = 2**23  # of all tokens together: four times those of the largest real vocabulary


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, with as many types and scores. An empty one encodes nothing; of equal ones the first."""

    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    matching: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """Options of `tokenizers.AddedToken` for some that are matched first: {"<|end|>": {"rstrip": True}}."""

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids by token, without the empty one."""
        found = {token: i for i, token in reversed(list(enumerate(self.tokens)))}
        found.pop("", None)
        return found

    @cached_property
    def same_as(self) -> dict[int, tuple[int, ...]]:
        """The id that encodes, for each later id of an equal token."""
        return {i: (self.ids[token],) for i, token in enumerate(self.tokens) if token and self.ids[token] != i}

    def literal(self, token: int | None) -> str | None:
        """How a token is written; None for no token and for one that encodes nothing."""
        return (self.tokens[token] or None) if token is not None else None


@dataclass(frozen=True)
class Described:
    """What a file says of a tokenizer, in the words of `Tokenizer`. same_as: ids that decode as others do."""

    file: Path
    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    eos_ids: tuple[int, ...]
    same_as: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def checked(vocabulary: Vocabulary, file: Path) -> Vocabulary:
    """The vocabulary itself. Raises DamagedModel if it is none, or would cost more than any real one."""
    tokens, types, scores = vocabulary.tokens, vocabulary.types, vocabulary.scores
    if not tokens:
        raise damaged(file, "its vocabulary is empty")
    if not len(tokens) == len(types) == len(scores):
        raise damaged(file, f"it has {len(tokens)} tokens, types for {len(types)} and scores for {len(scores)}")
    if max(map(len, tokens)) > LONGEST_TOKEN or sum(map(len, tokens)) > MOST_CHARACTERS:
        raise damaged(file, "its tokens are longer than those of any vocabulary")
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        raise damaged(file, "it has tokens with half a character, a lone surrogate") from None
    if not 0 <= min(types) <= max(types) <= max(TokenType):
        raise damaged(file, "it has tokens of a type that does not exist")
    if not all(map(math.isfinite, scores)):
        raise damaged(file, "it has scores that are no numbers")
    return vocabulary


def add_tokens(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Tell the library which tokens are matched before a text is tokenized, and which of them are markup."""
    markup: dict[str, tokenizers.AddedToken] = {}
    others: dict[str, tokenizers.AddedToken] = {}
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if token and kind in MATCHED_FIRST:
            options = {"normalized": False, **vocabulary.matching.get(token, {})}
            (markup if kind in MARKUP else others)[token] = tokenizers.AddedToken(token, **options)
    backend.add_special_tokens(list(markup.values()))
    backend.add_tokens([added for token, added in others.items() if token not in markup])


def put_around(backend: tokenizers.Tokenizer, begin: tuple[str, int] | None, end: tuple[str, int] | None) -> None:
    """Put a token (literal and id) before, and one after, every text that is encoded with special tokens."""
    if begin or end:
        names = [*(["begin"] if begin else []), "$A", *(["end"] if end else [])]
        tokens = [
            {"id": name, "ids": [token[1]], "tokens": [token[0]]}
            for name, token in (("begin", begin), ("end", end))
            if token
        ]
        backend.post_processor = processors.TemplateProcessing(single=names, special_tokens=tokens)
