"""Fill in the middle: encodes the text before and after a gap as the prompt that code models were trained with.

The tokens that mark them are found by their spelling, as in llama.cpp.
"""

from dataclasses import dataclass

from localllm.errors import UnsupportedModel
from localllm.text.control import ChatPiece, RenderedChat
from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class InfillTokens:
    """Control tokens by their spelling."""

    prefix: str  # the text before the gap
    suffix: str  # after the gap
    middle: str = ""  # begins the answer; "": the text before the gap comes last, and the answer continues it


INFILL_TOKENS = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    InfillTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    InfillTokens("[PREFIX]", "[SUFFIX]"),  # Codestral
)
# These end an infill answer besides all end tokens: the next file of a repository, or padding.
INFILL_END_TOKENS = (
    *("<|fim_pad|>", "<|fim_suffix|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    *("<fim_pad>", "<file_sep>", "<|code_suffix|>", "▁<EOT>", "<｜fim▁hole｜>"),
)


def find_infill_tokens(tokenizer: Tokenizer) -> InfillTokens | None:
    """Return this tokenizer's infill tokens; None if its model was not trained for infilling."""
    return next((marks for marks in INFILL_TOKENS if {marks.prefix, marks.suffix} <= tokenizer.added_tokens), None)


def encode_infill(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Return token ids of the prompt, with control tokens in either text encoded as plain text.

    Raises UnsupportedModel if the tokenizer has no infill tokens, and UsageError like `Tokenizer.encode`.
    """
    marks = find_infill_tokens(tokenizer)
    if marks is None:
        raise UnsupportedModel(
            "this model does not support infilling", "leave the suffix out, or use a code model"
        )
    prefix_ids, suffix_ids, middle_ids = (
        _ids(tokenizer, mark) for mark in (marks.prefix, marks.suffix, marks.middle)
    )
    # As in the models' own tokenizers, the text before the gap is encoded as a beginning, the one after it is not.
    prefix_ids += tokenizer.encode_chat(RenderedChat((ChatPiece(prefix, literal=True),) if prefix else ()))
    suffix_ids += tokenizer.encode_continuation(suffix) if suffix else []
    parts = prefix_ids + suffix_ids + middle_ids if marks.middle else suffix_ids + prefix_ids
    return tokenizer.encode("") + parts


def infill_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end an infill answer."""
    return tuple(sorted(tokenizer.added_token_ids(INFILL_END_TOKENS)))


def _ids(tokenizer: Tokenizer, mark: str) -> list[int]:
    return list(tokenizer.added_token_ids([mark]))
