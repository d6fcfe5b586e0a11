"""A folder whose tokenizer is the `tokenizer.json` of Hugging Face's library, which reads it itself."""

from pathlib import Path

import tokenizers

from localllm.text.folder import read_chat_templates, read_special_tokens
from localllm.text.vocabulary import Described


def read_tokenizer_json(file: Path) -> Described:
    """Read it and its companions. Raises DamagedModel for those; what the Rust library raises passes through."""
    backend = tokenizers.Tokenizer.from_file(str(file))
    special_tokens = read_special_tokens(file.parent)
    eos = backend.token_to_id(special_tokens.get("eos_token", ""))
    eos_ids = () if eos is None else (eos,)
    return Described(file, backend, special_tokens, read_chat_templates(file.parent), eos_ids)
