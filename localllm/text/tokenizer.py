"""Converts text to token ids and back with the model's own tokenizer."""

import base64
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import decoders

from localllm.errors import DamagedModel, LocalLLMError, PromptRefused, UnsupportedModel, UsageError
from localllm.files import MAX_JSON_BYTES, TOKENIZER_FILES, damaged_file, parse_json
from localllm.text.backends import SPACE, SpaceNormalization, byte_alphabet
from localllm.text.bounds import (
    TokenCountBound,
    check_growth,
    check_normalized_length,
    check_sections,
    growth_of_normalizer,
    read_sections,
)
from localllm.text.control import RenderedChat
from localllm.text.folder import find_turn_end_tokens, read_chat_templates, read_special_tokens
from localllm.text.gguf_tokenizer import read_gguf_tokenizer
from localllm.text.sentencepiece_model import read_sentencepiece_model
from localllm.text.tekken import read_tekken
from localllm.text.vocabulary import UNENCODABLE, TokenizerDescription

SPACE_DECODERS = ("Replace", "Metaspace")  # decode SPACE as a space
TEXT_EDGE_DECODERS = ("Fuse", "Strip")  # only change the ends of a text
# Folders with the `tokenizer.json` of Hugging Face's library.
CHARSMAP_KEY = "precompiled_charsmap"
TYPICAL_TOKEN_CHARACTERS = 4  # per token: texts with more than this times a context are mostly too long for it
_NEVER_DAMAGE = (KeyboardInterrupt, SystemExit, GeneratorExit)


def read_tokenizer_json(file: Path) -> TokenizerDescription:
    """Read tokenizer.json and its companion files.

    Raises DamagedModel for the latter; exceptions of the Rust library are not caught.
    """
    if file.stat().st_size > MAX_JSON_BYTES:
        raise damaged_file(file, "it is larger than any vocabulary")
    content = file.read_bytes()
    check_sections(read_sections(content), str(file))
    # Escapes might hide it; parsing every file is slow.
    if CHARSMAP_KEY.encode() in content or b"\\u00" in content:
        for table in _tables(parse_json(content, file).get("normalizer")):
            # Validates the table: a wrong size in it would end the process.
            SpaceNormalization(precompiled_charsmap=base64.b64decode(table))
    backend = tokenizers.Tokenizer.from_buffer(content)
    special_tokens = read_special_tokens(file.parent)
    eos = backend.token_to_id(special_tokens.get("eos_token", ""))
    eos_ids = () if eos is None else (eos,)
    return TokenizerDescription(file, backend, special_tokens, read_chat_templates(file.parent), eos_ids)


def _tables(normalizer: Any) -> Iterator[str]:
    """Yield the tables of characters anywhere in a normalizer."""
    for part in normalizer if isinstance(normalizer, list) else [normalizer]:
        if isinstance(part, dict):
            if isinstance(part.get(CHARSMAP_KEY), str):
                yield part[CHARSMAP_KEY]
            yield from _tables(part.get("normalizers"))


_READERS: dict[str, Callable[[Path], TokenizerDescription]] = dict(
    zip(TOKENIZER_FILES, (read_tokenizer_json, read_tekken, read_sentencepiece_model), strict=True)
)


class Tokenizer:
    """One model's tokenizer, with special tokens and chat templates from its files.

    `tokenizer.json` takes precedence, as in `transformers` 5: `add_bos_token` of tokenizer_config.json is ignored
    if it exists, and its post-processor determines what is added before and after a text.

    `decode(encode(text, special=False))` is the text for byte-level tokenizers, and for those with byte fallback,
    except for changes by the model's normalizer (NFC in Qwen's tokenizer.json, not in its GGUF version), U+2581
    where it represents a space, whitespace that an added token strips, and the space that SentencePiece prepends
    to what follows an added token.
    """

    special_tokens: dict[str, str]
    """Named special tokens, as used in templates: {"bos_token": "<s>", ...}."""

    chat_templates: dict[str, str]
    """Jinja sources by name; most models have none or only "default"."""

    control_tokens: frozenset[str]
    """Literals of tokens that are markup, never text: `special` in tokenizer.json, or named in the config."""

    added_tokens: frozenset[str]
    """Literals of all tokens that are matched before tokenization, including control tokens."""

    special_ids: dict[int, str]
    """Literals by id of the tokens that `decode` omits."""

    eos_ids: tuple[int, ...]
    """Tokens that end an answer: the named one, and those of `ends.py`. generation_config.json may add more."""

    def __init__(self, description: TokenizerDescription):
        backend = description.backend
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._growth = growth_of_normalizer(backend.normalizer)
        check_growth(self._growth, str(description.file))
        self._source = description.file.name
        self._same_as = description.aliases
        self._unwritable = backend.token_to_id(UNENCODABLE)
        self._token_texts: dict[tuple[int, bool], str] = {}  # of `decode_token`
        self.special_tokens = dict(description.special_tokens)
        self.chat_templates = dict(description.chat_templates)
        added = {index: token for index, token in backend.get_added_tokens_decoder().items() if token.content}
        named_literals = set(self.special_tokens.values())
        self.added_tokens = frozenset(token.content for token in added.values())
        self.control_tokens = frozenset(
            token.content for token in added.values() if token.special or token.content in named_literals
        )
        self.special_ids = {index: token.content for index, token in added.items() if token.special}
        self._added = {index: token.content for index, token in added.items()}
        turn_ends = find_turn_end_tokens(self.chat_templates.values(), self.added_tokens)
        turn_end_ids = sorted(index for index, token in added.items() if token.content in turn_ends)
        self.eos_ids = tuple(dict.fromkeys([*description.eos_ids, *turn_end_ids]))

    @classmethod
    def from_checkpoint(cls, path: Path, metadata: Mapping[str, Any] | None) -> Self:
        """Read a folder, or a GGUF file with its metadata. Raises the errors of `from_folder` and `from_gguf`."""
        return cls.from_folder(path) if metadata is None else cls.from_gguf(metadata, path)

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """Read the first of TOKENIZER_FILES that exists, and its companion files.

        Raises UnsupportedModel if there is none or it is not supported, DamagedModel if a file cannot be parsed.
        """
        file = next((path / name for name in TOKENIZER_FILES if (path / name).is_file()), None)
        if file is None:
            remedy = "look for a repository of this model that has one of them"
            raise UnsupportedModel(f"{path} has no {' or '.join(TOKENIZER_FILES)}", remedy)
        with _raise_damaged(f"{file} cannot be read"):
            return cls(_READERS[file.name](file))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], file: Path) -> Self:
        """Build the tokenizer from a GGUF file's metadata. file: for error messages

        Raises UnsupportedModel if it is not supported, DamagedModel if it is inconsistent.
        """
        with _raise_damaged(f"the tokenizer of {file} cannot be built"):
            return cls(read_gguf_tokenizer(metadata, file))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones. A model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True) - (self._unwritable is not None)

    def as_json(self) -> dict[str, Any]:
        """Return the tokenizer as the content of a `tokenizer.json`, whichever file it was read from."""
        return json.loads(self._backend.to_str())

    def token(self, index: int) -> str | None:
        """Return the token of an id as spelled in its file; None if there is no such token."""
        if index in self._added:  # the backend returns these after normalization
            return self._added[index]
        return None if index == self._unwritable else self._backend.id_to_token(index)

    def added_token_ids(self, literals: Collection[str]) -> frozenset[int]:
        """Return the ids of added tokens with these literals."""
        return frozenset(index for index, literal in self._added.items() if literal in literals)

    def token_bytes(self, count: int) -> list[bytes]:
        """Return the bytes that each id below `count` adds in the middle of a text; b"" for no token.

        Raises UnsupportedModel if the decoder does not define them.
        """
        tokens = (self.token(index) for index in range(count))
        values = token_bytes(tokens, self._backend.decoder)
        for index, parts in self._same_as.items():
            if index < count:
                values[index] = b"".join(values[part] for part in parts)
        return values

    def min_token_count(self, text: str, limit: int) -> int:
        """Return a lower bound of the text's token count; 0 if unknown, or if the count may well be within
        `limit`.
        """
        if len(text) <= limit * TYPICAL_TOKEN_CHARACTERS:
            return 0
        return self._fewest.min_tokens(text)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return token ids of a prompt. Control tokens in it become control ids: it is not a chat message.

        special: add the model's tokens before and after a text (BOS, EOS). Raises UsageError if the text contains
        lone surrogates, or a character that the vocabulary cannot encode; DamagedModel if the tokenizer's file is
        inconsistent.
        """
        return self._encode(text, special=special)

    def encode_chat(self, chat: RenderedChat) -> list[int]:
        """Return token ids of a rendered chat, without adding tokens, as the template writes BOS itself.

        Its literal pieces are control tokens in messages, which are encoded as text. Raises UsageError if the
        tokenizer cannot do that, or like `encode`.
        """
        ids: list[int] = []
        for piece in chat.pieces:
            encode = self._encode_literal if piece.literal else self._encode_plain
            ids += self._encode_on(piece.text, encode) if ids else encode(piece.text)
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Return token ids of a text in the middle of another, with control tokens in it encoded as text."""
        return self._encode_on(text, self._encode_literal)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of these ids. Invalid bytes become U+FFFD; ids without token are omitted."""
        if self._same_as:
            ids = [alias for token in ids for alias in self._same_as.get(token, (token,))]
        if self._unwritable in ids:  # a row of the embedding beyond the vocabulary
            ids = [token for token in ids if token != self._unwritable]
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special)
        except BaseException:  # as `_raise_damaged`, which would double the time of a short text, raises it
            with _raise_damaged(f"{self._source} is inconsistent"):
                raise

    def decode_token(self, token: int, *, skip_special: bool = True) -> str:
        """Return the text of one id, remembered for the next time."""
        key = token, skip_special
        text = self._token_texts.get(key)
        if text is None:
            text = self._token_texts[key] = self.decode([token], skip_special=skip_special)
        return text

    def _encode(self, text: str, *, special: bool) -> list[int]:
        _check_characters(text)
        check_normalized_length(text, self._backend.normalizer, self._growth)
        with _raise_damaged(f"{self._source} is inconsistent"):
            ids = self._backend.encode(text, add_special_tokens=special).ids
        return self._checked(ids)

    def _encode_plain(self, text: str) -> list[int]:
        return self._encode(text, special=False)

    def _encode_literal(self, text: str) -> list[int]:
        """Run the steps of `tokenizers` except the first, which matches added tokens."""
        _check_characters(text)
        normalizer, pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer
        check_normalized_length(text, normalizer, self._growth)
        with _raise_damaged(f"{self._source} is inconsistent"):
            normalized = normalizer.normalize_str(text) if normalizer else text
            words = (
                [word for word, _ in pre_tokenizer.pre_tokenize_str(normalized)] if pre_tokenizer else [normalized]
            )
            ids = [token.id for word in words for token in self._backend.model.tokenize(word)]
        if not self._added.keys().isdisjoint(ids):
            raise PromptRefused(f"this model's tokenizer cannot encode {text!r} as text", "leave it out")
        return self._checked(ids)

    def _checked(self, ids: list[int]) -> list[int]:
        if self._unwritable is not None and self._unwritable in ids:
            raise UsageError("the text has a character that this model's vocabulary cannot encode", "leave it out")
        return ids

    def _encode_on(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Encode in the middle of a text: after a newline, so that SentencePiece prepends no space."""
        ids = encode("\n" + text)
        newline = self._newline_ids
        return ids[len(newline) :] if ids[: len(newline)] == newline else encode(text)

    @cached_property
    def _fewest(self) -> TokenCountBound:
        spelled = map(self.token, range(self._backend.get_vocab_size(with_added_tokens=True)))
        return TokenCountBound.from_tokenizer(self._backend, [token for token in spelled if token is not None])

    @cached_property
    def _newline_ids(self) -> list[int]:
        return self._encode_plain("\n")


@contextmanager
def _raise_damaged(message: str) -> Iterator[None]:
    """Raise DamagedModel for exceptions of the Rust library, including panics, which are BaseExceptions."""
    try:
        yield
    except (LocalLLMError, *_NEVER_DAMAGE):
        raise
    except BaseException as error:
        raise DamagedModel(f"{message}: {error}", "fetch the model again") from error


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"character {error.start} of the text is a lone surrogate", "send valid Unicode"
        ) from error


def token_bytes(tokens: Iterable[str | None], decoder: decoders.Decoder | None) -> list[bytes]:
    """Return the bytes of each token as spelled in its file, b"" for None; a token may be a part of a character.

    Does for single tokens what a decoder of the Rust library does for all of them. Raises UnsupportedModel for an
    unknown decoder.
    """
    serialized: Any = decoder.__getstate__() if decoder else b'{"type": "none at all"}'
    steps = list(_steps(json.loads(serialized)))
    types = {step["type"] for step in steps}
    if types == {"ByteLevel"}:
        return [b"" if token is None else _of_alphabet(token) for token in tokens]
    replaced = [step["pattern"] for step in steps if step["type"] == "Replace"]
    if types <= {*SPACE_DECODERS, *TEXT_EDGE_DECODERS, "ByteFallback"} and replaced in ([], [{"String": SPACE}]):
        fallback_bytes = (
            {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if "ByteFallback" in types else {}
        )
        return [b"" if t is None else fallback_bytes.get(t) or t.replace(SPACE, " ").encode() for t in tokens]
    raise UnsupportedModel(
        f"the decoder of this tokenizer ({', '.join(sorted(types))}) does not define bytes of tokens",
        "use no schema or grammar",
    )


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _steps(part)
    else:
        yield decoder


_BYTES = {ord(letter): byte for byte, letter in byte_alphabet().items()}


def _of_alphabet(token: str) -> bytes:
    """Return a token's bytes; like in the library, a token with a letter outside the alphabet is text."""
    translated = token.translate(_BYTES)
    return translated.encode("latin-1") if all(ord(letter) in _BYTES for letter in token) else token.encode()
