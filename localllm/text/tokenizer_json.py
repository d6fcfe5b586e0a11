"""A folder whose tokenizer is the `tokenizer.json` of Hugging Face's library, which reads it itself."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from localllm.files import MAX_JSON_BYTES, damaged_file, parse_json
from localllm.text.backends import SpaceNormalization
from localllm.text.folder import read_chat_templates, read_special_tokens
from localllm.text.vocabulary import TokenizerDescription

CHARSMAP_KEY = "precompiled_charsmap"


def read_tokenizer_json(file: Path) -> TokenizerDescription:
    """Read it and its companions. Raises DamagedModel for those; what the Rust library raises passes through."""
    if file.stat().st_size > MAX_JSON_BYTES:
        raise damaged_file(file, "it is larger than any vocabulary")
    content = file.read_bytes()
    if CHARSMAP_KEY.encode() in content or b"\\u00" in content:  # or escapes may spell it; parsing all takes time
        for table in _tables(parse_json(content, file).get("normalizer")):
            SpaceNormalization(
                precompiled_charsmap=base64.b64decode(table)
            )  # which checks it: a wrong size in one ends the process
    backend = tokenizers.Tokenizer.from_buffer(content)
    special_tokens = read_special_tokens(file.parent)
    eos = backend.token_to_id(special_tokens.get("eos_token", ""))
    eos_ids = () if eos is None else (eos,)
    return TokenizerDescription(file, backend, special_tokens, read_chat_templates(file.parent), eos_ids)


def _tables(normalizer: Any) -> Iterator[str]:
    """The tables of characters anywhere in it."""
    for part in normalizer if isinstance(normalizer, list) else [normalizer]:
        if isinstance(part, dict):
            if isinstance(part.get(CHARSMAP_KEY), str):
                yield part[CHARSMAP_KEY]
            yield from _tables(part.get("normalizers"))
