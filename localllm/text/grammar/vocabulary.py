"""A model's vocabulary as llguidance wants it. Made once a model: it takes about a second of 150,000 tokens."""

from collections.abc import Collection, Sequence

import llguidance
from llguidance import LLTokenizer

from localllm.text.tokenizer import Tokenizer


class LLGuidanceVocabulary:
    """`llguidance.TokenizerWrapper`, which goes by these names; its own would try the tokenizer out."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Collection[int], markup: Collection[str]
    ):
        """`vocab_size`: rows of the model's embedding, of which those without a token are never allowed;
        `end_token_ids`: tokens
        that end an answer; `markup`: literals that are more than text, besides the tokenizer's own."""
        tokens = tokenizer.token_bytes(vocab_size)
        self.end_ids = sorted(end for end in end_token_ids if end < vocab_size)
        if not self.end_ids:  # one that no model can say: an answer ends where nothing may follow
            self.end_ids = [vocab_size]
            tokens.append(b"")
        self.tokens: Sequence[bytes] = tokens
        self.eos_token_id = self.end_ids[0]
        control = {
            *tokenizer.special_ids,
            *tokenizer.added_token_ids(tokenizer.control_tokens | frozenset(markup)),
        }
        self.special_token_ids = sorted(token for token in control if token < vocab_size)
        self._encode = tokenizer.encode_continuation

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)

    def to_llguidance(self) -> LLTokenizer:
        return llguidance.LLTokenizer(self, eos_token=self.end_ids)  # pyright: ignore[reportArgumentType] - by its names
