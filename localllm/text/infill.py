"""Fill in the middle: a text before a gap and one behind it as the prompt that models of code were trained with.

Which tokens mark the two is told by how they are written, as llama.cpp does it. Knows nothing of requests.
"""

from dataclasses import dataclass

from localllm.errors import UnsupportedModel
from localllm.text.control import ChatPiece, RenderedChat
from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class InfillTokens:
    """Control tokens as they are written."""

    prefix: str  # the text before the gap
    suffix: str  # the text behind it
    middle: str = ""  # what fills it; "": the text before the gap stands last, and the answer goes on from it


INFILL_TOKENS = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    InfillTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    InfillTokens("[PREFIX]", "[SUFFIX]"),  # Codestral
)
# These end what fills a gap, beside what ends every answer: the next file of a repository, or padding.
INFILL_END_TOKENS = (
    *("<|fim_pad|>", "<|fim_suffix|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    *("<fim_pad>", "<file_sep>", "<|code_suffix|>", "▁<EOT>", "<｜fim▁hole｜>"),
)


def find_infill_tokens(tokenizer: Tokenizer) -> InfillTokens | None:
    """Those of this tokenizer; None: its model was not trained to fill gaps."""
    return next((marks for marks in INFILL_TOKENS if {marks.prefix, marks.suffix} <= tokenizer.added_tokens), None)


def encode_infill(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Token ids of the prompt. Control tokens written in either text are encoded as the text they are.

    Raises UnsupportedModel where the tokenizer has no such tokens, and UsageError as `Tokenizer.encode` does.
    """
    marks = find_infill_tokens(tokenizer)
    if marks is None:
        raise UnsupportedModel("this model does not fill gaps", "leave the suffix out, or ask a model of code")
    before, behind, answer = (_ids(tokenizer, mark) for mark in (marks.prefix, marks.suffix, marks.middle))
    # As the models' own tokenizers do: the text before the gap is the beginning of one, that behind it is not.
    before += tokenizer.encode_chat(RenderedChat((ChatPiece(prefix, literal=True),) if prefix else ()))
    behind += tokenizer.encode_continuation(suffix) if suffix else []
    parts = before + behind + answer if marks.middle else behind + before
    return tokenizer.encode("") + parts


def infill_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end what fills a gap."""
    return tuple(sorted(tokenizer.added_token_ids(INFILL_END_TOKENS)))


def _ids(tokenizer: Tokenizer, mark: str) -> list[int]:
    return list(tokenizer.added_token_ids([mark]))
