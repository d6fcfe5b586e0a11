"""A model's vocabulary as llguidance wants it. Made once a model: it takes about a second of 150,000 tokens."""

from collections.abc import Collection, Sequence

import llguidance
from llguidance import LLTokenizer

from localllm.text.tokenizer import Tokenizer


class Vocabulary:
    """`llguidance.TokenizerWrapper`, which goes by these names; its own would try the tokenizer out."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Collection[int], markup: Collection[str]):
        """`size`: rows of the model's embedding, of which those without a token are never allowed; `ends`: tokens
        that end an answer; `markup`: literals that are more than text, besides the tokenizer's own."""
        tokens = tokenizer.token_bytes(size)
        self.ends = sorted(end for end in ends if end < size)
        if not self.ends:  # one that no model can say: an answer ends where nothing may follow
            self.ends = [size]
            tokens.append(b"")
        self.tokens: Sequence[bytes] = tokens
        self.eos_token_id = self.ends[0]
        control = {*tokenizer.special_ids, *tokenizer.ids_of(tokenizer.control_tokens | frozenset(markup))}
        self.special_token_ids = sorted(token for token in control if token < size)
        self._encode = tokenizer.encode_amid

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)

    def for_matchers(self) -> LLTokenizer:
        return llguidance.LLTokenizer(self, eos_token=self.ends)  # pyright: ignore[reportArgumentType] - by its names
