"""Reads a tokenizer from SentencePiece's `tokenizer.model`, with additions from tokenizer_config.json.

Source of field numbers: src/sentencepiece_model.proto of github.com/google/sentencepiece.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from localllm.errors import UnsupportedModel
from localllm.files import damaged_file, read_json
from localllm.text.backends import SpaceNormalization, build_score_bpe, build_unigram
from localllm.text.folder import read_chat_templates, read_special_tokens
from localllm.text.vocabulary import (
    TokenizerDescription,
    TokenType,
    Vocabulary,
    check_vocabulary,
    register_added_tokens,
    set_bos_eos,
)

# The value of a field of a protocol buffer message, independent of its schema.
FieldValue = int | float | bytes
FieldT = TypeVar("FieldT", int, float, bytes)
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")  # a word in base 64 and its rank
UNIGRAM, BPE_MODEL = 1, 2
MAX_FILE_BYTES = 64 * 2**20  # the largest real one, with 262,000 tokens, has five megabytes
MAX_ADDED_ID_GAP = 2**16  # how far an added token's id may exceed SentencePiece's own
SPECIAL_TOKEN_FIELDS = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2), "pad_token": (43, -1)}
ADDED_TOKEN_OPTIONS = ("lstrip", "rstrip", "single_word")


class _Message:
    """The last value of each field, with the type and default of the schema."""

    def __init__(self, content: bytes):
        self._fields = dict(read_fields(memoryview(content)))

    def get(self, number: int, default: FieldT) -> FieldT:
        value = self._fields.get(number, default)
        if not isinstance(value, type(default)):
            raise ValueError(f"field {number} is not of type {type(default).__name__}")
        return value


def read_sentencepiece_model(file: Path) -> TokenizerDescription:
    """Build the tokenizer; added tokens, names and BOS come from the JSON files next to it.

    A space is prepended to the text and to what follows an added token, regardless of `legacy`, as in the
    tokenizer.json and GGUF versions of such models. Raises DamagedModel if a file cannot be parsed,
    UnsupportedModel for an unsupported model type; exceptions of the Rust library are not caught.
    """
    if file.stat().st_size > MAX_FILE_BYTES:
        raise damaged_file(file, "it is larger than any vocabulary")
    content = file.read_bytes()
    if TIKTOKEN_LINE.match(content):
        raise UnsupportedModel(
            f"{file} is a vocabulary of tiktoken, as Meta publishes Llama's, and has no special tokens",
            "take an edition of the model with tokenizer.json",
        )
    try:
        pieces, trainer, normalizer = _parts(content)
        model_type, unknown = trainer.get(3, UNIGRAM), trainer.get(40, 0)
        spacing = SpaceNormalization(
            bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)), normalizer.get(2, b"")
        )
        is_unsupported = trainer.get(24, 0) or not normalizer.get(5, 1)
        trained_ids = {name: trainer.get(*field) for name, field in SPECIAL_TOKEN_FIELDS.items()}
    except ValueError as error:
        raise damaged_file(file, f"it is not a SentencePiece model ({error})") from None
    if model_type not in (UNIGRAM, BPE_MODEL) or is_unsupported:
        raise UnsupportedModel(f"{file} has an unsupported model type", "look for a version with tokenizer.json")
    pieces = check_vocabulary(pieces, file)
    config = read_json(file.parent / "tokenizer_config.json")
    vocabulary = check_vocabulary(_with_added(pieces, file.parent, config), file)
    literals = {
        name: pieces.tokens[token] for name, token in trained_ids.items() if 0 <= token < len(pieces.tokens)
    }
    special_tokens = literals | read_special_tokens(file.parent)
    if not 0 <= unknown < len(pieces.tokens):
        raise damaged_file(file, "its unknown token is not one of its tokens")
    if model_type == BPE_MODEL:
        backend = build_score_bpe(vocabulary, vocabulary.literal(unknown), spacing)
    else:
        backend = build_unigram(vocabulary, unknown, spacing)
    register_added_tokens(backend, vocabulary)
    bos_eos = {
        name: (special_tokens[name], vocabulary.ids[special_tokens[name]])
        for name in ("bos_token", "eos_token")
        if special_tokens.get(name) in vocabulary.ids
    }
    begin = bos_eos.get("bos_token") if config.get("add_bos_token", model_type == BPE_MODEL) else None
    end = bos_eos.get("eos_token") if config.get("add_eos_token", False) else None
    set_bos_eos(backend, begin, end)
    eos_ids = (bos_eos["eos_token"][1],) if "eos_token" in bos_eos else ()
    return TokenizerDescription(
        file, backend, special_tokens, read_chat_templates(file.parent), eos_ids, vocabulary.aliases
    )


def _parts(content: bytes) -> tuple[Vocabulary, _Message, _Message]:
    """Return the pieces, and the trainer and normalizer specs. Raises ValueError."""
    tokens: list[str] = []
    types: list[int] = []
    scores: list[float] = []
    specs = {2: b"", 3: b""}
    for number, value in read_fields(memoryview(content)):
        if number not in (1, 2, 3):
            continue
        if not isinstance(value, bytes):
            raise ValueError(f"field {number} is not a message")
        if number == 1:
            piece = _Message(value)
            tokens.append(piece.get(1, b"").decode())
            scores.append(piece.get(2, 0.0))
            types.append(piece.get(3, int(TokenType.NORMAL)))
        else:
            specs[number] = value
    return Vocabulary(tokens, types, scores), _Message(specs[2]), _Message(specs[3])


def _with_added(pieces: Vocabulary, folder: Path, config: dict[str, Any]) -> Vocabulary:
    """Return the pieces with the tokens that the folder adds or replaces, each at its stated id."""
    tokens, types, scores = list(pieces.tokens), list(pieces.types), list(pieces.scores)
    matching: dict[str, dict[str, bool]] = {}
    for token, literal, options in _added(folder, config):
        if not 0 <= token < len(pieces.tokens) + MAX_ADDED_ID_GAP:
            raise damaged_file(folder / "tokenizer_config.json", f"it adds {literal!r} as token {token}")
        missing = token + 1 - len(tokens)
        tokens += [""] * missing
        types += [TokenType.UNUSED] * missing
        scores += [0.0] * missing
        tokens[token] = literal
        types[token] = TokenType.CONTROL if options.get("special") is True else TokenType.USER_DEFINED
        matching[literal] = {name: options.get(name) is True for name in ADDED_TOKEN_OPTIONS}
    return Vocabulary(tokens, types, scores, matching)


def _added(folder: Path, config: dict[str, Any]) -> list[tuple[int, str, dict[str, Any]]]:
    """Return id, literal and options of each added token; `added_tokens.json` is the older file."""
    try:
        added = [(token, literal, {}) for literal, token in read_json(folder / "added_tokens.json").items()]
        decoder = config.get("added_tokens_decoder", {})
        added += [(int(token), options["content"], options) for token, options in decoder.items()]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise damaged_file(
            folder / "tokenizer_config.json", "its added tokens have an unknown structure"
        ) from None
    if not all(type(token) is int and isinstance(literal, str) for token, literal, _ in added):
        raise damaged_file(folder / "added_tokens.json", "its tokens have an unknown structure")
    return added


def read_fields(message: memoryview) -> Iterator[tuple[int, FieldValue]]:
    """Yield number and value of each field: an int, a 32-bit float, or the bytes of a string or message.

    Raises ValueError if the bytes are not a message. Groups and 64-bit fields are in no schema read here. Source:
    protobuf.dev/programming-guides/encoding.
    """
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        wire = tag & 7
        if wire == 0:
            value, position = _varint(message, position)
            yield tag >> 3, value
        elif wire == 2:
            size, position = _varint(message, position)
            position += size
            yield tag >> 3, bytes(_within(message, position - size, position))
        elif wire == 5:
            position += 4
            yield tag >> 3, struct.unpack("<f", _within(message, position - 4, position))[0]
        else:
            raise ValueError(f"a field of wire type {wire} at byte {position}")


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:  # ten bytes hold 64 bits
        byte = _within(message, position, position + 1)[0]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise ValueError(f"a number of more than ten bytes at byte {position}")


def _within(message: memoryview, begin: int, end: int) -> memoryview:
    if end > len(message):
        raise ValueError(f"{end - begin} bytes at byte {begin} of {len(message)}")
    return message[begin:end]
