"""Reads a checkpoint's tokenizer, from a folder or a GGUF file."""

from localllm.checkpoint.header import Header
from localllm.text.tokenizer import Tokenizer


def read_tokenizer(header: Header) -> Tokenizer:
    """Return the tokenizer. Raises like `Tokenizer.from_folder` and `Tokenizer.from_gguf`."""
    if header.gguf is None:
        return Tokenizer.from_folder(header.path)
    return Tokenizer.from_gguf(header.gguf, header.path)
