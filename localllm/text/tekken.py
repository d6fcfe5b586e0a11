"""A folder whose tokenizer is Mistral's tekken.json: tiktoken's ranks of byte strings, after the special tokens.

Source: `Tekkenizer` of github.com/mistralai/mistral-common.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.files import damaged_file, read_json
from localllm.text.backends import build_byte_level_bpe, byte_alphabet
from localllm.text.folder import read_chat_templates, read_special_tokens
from localllm.text.merges import derive_merges
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
# What files of up to version 7 leave out.
V7_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def read_tekken(file: Path) -> TokenizerDescription:
    """Build the tokenizer. BOS goes before every text, as in these models' other editions.

    Raises DamagedModel if the file cannot be understood, UnsupportedModel for a pattern that is not known: a
    stranger's regular expression could take for ever. What the Rust library raises passes through.
    """
    content = read_json(file)
    try:
        pattern = content["config"]["pattern"]
        special = _special(content)
        words = _words(content, len(special))
    except (KeyError, TypeError, ValueError) as error:
        raise damaged_file(file, f"it is no tekken.json ({error!r})") from None
    if pattern not in PATTERNS:
        raise UnsupportedModel(f"{file} cuts texts by a pattern that is not known", "use another edition")
    tokens = special + words
    types = [TokenType.CONTROL] * len(special) + [TokenType.NORMAL] * len(words)
    vocabulary = check_vocabulary(Vocabulary(tokens, types, [0.0] * len(tokens)), file)
    known = frozenset(words)
    merges = derive_merges(enumerate(words), known)
    ids = vocabulary.ids
    backend = build_byte_level_bpe(vocabulary, merges, PATTERNS[pattern], None)
    register_added_tokens(backend, vocabulary)
    named = {
        name: literal for name, literal in DEFAULT_SPECIAL_TOKENS.items() if literal in ids
    } | read_special_tokens(file.parent)
    begin, end = named.get("bos_token"), named.get("eos_token")
    set_bos_eos(backend, (begin, ids[begin]) if begin in ids else None, None)
    return TokenizerDescription(
        file,
        backend,
        named,
        read_chat_templates(file.parent),
        (ids[end],) if end in ids else (),
        vocabulary.aliases,
    )


def _special(content: Mapping[str, Any]) -> list[str]:
    """The special tokens by id, filled up to the number that the file reserves."""
    count = content["config"]["default_num_special_tokens"]
    listed = content.get("special_tokens")
    found = dict(enumerate(V7_SPECIAL_TOKENS))
    if listed is not None:
        found = {entry["rank"]: entry["token_str"] for entry in listed}
        if len(found) < len(listed):
            raise ValueError("two special tokens have one rank")
    if not all(
        type(rank) is int and 0 <= rank < count and isinstance(token, str) for rank, token in found.items()
    ):
        raise ValueError("a special token has no place")
    if not len(found) <= count <= len(content["vocab"]):
        raise ValueError(f"{count} special tokens")
    return [found.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]


def _words(content: Mapping[str, Any], special: int) -> list[str]:
    """The byte strings by rank, in GPT-2's alphabet; the file may hold more than its vocabulary takes."""
    count = content["config"]["default_vocab_size"] - special
    entries = content["vocab"][:count]
    if not 0 < count == len(entries) or any(entry["rank"] != rank for rank, entry in enumerate(entries)):
        raise ValueError("its ranks are not those of its vocabulary")
    written = byte_alphabet()
    words = (base64.b64decode(entry["token_bytes"], validate=True) for entry in entries)
    return [word.decode("latin-1").translate(written) for word in words]
