"""A checkpoint's tokenizer, wherever it keeps it."""

from localllm.checkpoint.header import Header
from localllm.text.tokenizer import Tokenizer


def read_tokenizer(header: Header) -> Tokenizer:
    """Raises what `Tokenizer.from_folder` and `from_gguf` raise."""
    if header.gguf is None:
        return Tokenizer.from_folder(header.path)
    return Tokenizer.from_gguf(header.gguf, header.path)
