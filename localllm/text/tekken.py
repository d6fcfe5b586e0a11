"""Reads a tokenizer from Mistral's tekken.json: tiktoken's ranks of byte strings, after the special tokens.

Source: `Tekkenizer` of github.com/mistralai/mistral-common.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.files import damaged_file, read_json
from localllm.text.backends import build_byte_level_bpe, byte_alphabet, derive_merges
from localllm.text.folder import read_chat_templates, read_special_tokens
from localllm.text.pretokenizers import O200K, TEKKEN, PreTokenizer
from localllm.text.vocabulary import (
    TokenizerDescription,
    TokenType,
    Vocabulary,
    check_vocabulary,
    register_added_tokens,
    set_bos_eos,
)

PATTERNS = {pattern: PreTokenizer((pattern,), ignore_merges=True) for pattern in (TEKKEN, O200K)}
DEFAULT_SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
# Not contained in files of up to version 7.
V7_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def read_tekken(file: Path) -> TokenizerDescription:
    """Build the tokenizer. BOS is added to every text, as in other versions of these models.

    Raises DamagedModel if the file cannot be parsed, UnsupportedModel for an unknown pattern: an untrusted regular
    expression could take forever. Exceptions of the Rust library are not caught.
    """
    content = read_json(file)
    try:
        pattern = content["config"]["pattern"]
        special = _special(content)
        words = _words(content, len(special))
    except (KeyError, TypeError, ValueError) as error:
        raise damaged_file(file, f"it is not a tekken.json ({error!r})") from None
    if pattern not in PATTERNS:
        raise UnsupportedModel(f"{file} splits text by an unknown pattern", "use another version")
    tokens = special + words
    types = [TokenType.CONTROL] * len(special) + [TokenType.NORMAL] * len(words)
    vocabulary = check_vocabulary(Vocabulary(tokens, types, [0.0] * len(tokens)), file)
    known_words = frozenset(words)
    merges = derive_merges(enumerate(words), known_words)
    ids = vocabulary.ids
    backend = build_byte_level_bpe(vocabulary, merges, PATTERNS[pattern], None)
    register_added_tokens(backend, vocabulary)
    literals = {
        name: literal for name, literal in DEFAULT_SPECIAL_TOKENS.items() if literal in ids
    } | read_special_tokens(file.parent)
    begin, end = literals.get("bos_token"), literals.get("eos_token")
    set_bos_eos(backend, (begin, ids[begin]) if begin in ids else None, None)
    return TokenizerDescription(
        file,
        backend,
        literals,
        read_chat_templates(file.parent),
        (ids[end],) if end in ids else (),
        vocabulary.aliases,
    )


def _special(content: Mapping[str, Any]) -> list[str]:
    """Return the special tokens by id, padded to the number that the file reserves."""
    count = content["config"]["default_num_special_tokens"]
    entries = content.get("special_tokens")
    tokens = dict(enumerate(V7_SPECIAL_TOKENS))
    if entries is not None:
        tokens = {entry["rank"]: entry["token_str"] for entry in entries}
        if len(tokens) < len(entries):
            raise ValueError("two special tokens have the same rank")
    if not all(
        type(rank) is int and 0 <= rank < count and isinstance(token, str) for rank, token in tokens.items()
    ):
        raise ValueError("a special token has an invalid rank")
    if not len(tokens) <= count <= len(content["vocab"]):
        raise ValueError(f"{count} special tokens")
    return [tokens.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]


def _words(content: Mapping[str, Any], special: int) -> list[str]:
    """Return the byte strings by rank, in GPT-2's alphabet; the file may contain more than its vocabulary uses."""
    count = content["config"]["default_vocab_size"] - special
    entries = content["vocab"][:count]
    if not 0 < count == len(entries) or any(entry["rank"] != rank for rank, entry in enumerate(entries)):
        raise ValueError("its ranks do not match its vocabulary")
    alphabet = byte_alphabet()
    words = (base64.b64decode(entry["token_bytes"], validate=True) for entry in entries)
    return [word.decode("latin-1").translate(alphabet) for word in words]
