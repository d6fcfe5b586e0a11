"""Fill in the middle: a text before a gap and one behind it as the prompt that models of code were trained with.

Which tokens mark the two is told by how they are written, as llama.cpp does it. Knows nothing of requests.
"""

from dataclasses import dataclass

from localllm.errors import UnsupportedModel
from localllm.text.control import Piece, RenderedChat
from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Marks:
    """Control tokens as they are written."""

    before: str  # the text before the gap
    behind: str  # the text behind it
    answer: str = ""  # what fills it; "": the text before the gap stands last, and the answer goes on from it


MARKS = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Marks("[PREFIX]", "[SUFFIX]"),  # Codestral
)
# These end what fills a gap, beside what ends every answer: the next file of a repository, or padding.
ENDS = (
    *("<|fim_pad|>", "<|fim_suffix|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    *("<fim_pad>", "<file_sep>", "<|code_suffix|>", "▁<EOT>", "<｜fim▁hole｜>"),
)


def marks_of(tokenizer: Tokenizer) -> Marks | None:
    """Those of this tokenizer; None: its model was not trained to fill gaps."""
    return next((marks for marks in MARKS if {marks.before, marks.behind} <= tokenizer.added_tokens), None)


def infill(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Token ids of the prompt. Control tokens written in either text are encoded as the text they are.

    Raises UnsupportedModel where the tokenizer has no such tokens, and UsageError as `Tokenizer.encode` does.
    """
    marks = marks_of(tokenizer)
    if marks is None:
        raise UnsupportedModel("this model does not fill gaps", "leave the suffix out, or ask a model of code")
    before, behind, answer = (_ids(tokenizer, mark) for mark in (marks.before, marks.behind, marks.answer))
    # As the models' own tokenizers do: the text before the gap is the beginning of one, that behind it is not.
    before += tokenizer.encode_chat(RenderedChat((Piece(prefix, literal=True),) if prefix else ()))
    behind += tokenizer.encode_amid(suffix) if suffix else []
    parts = before + behind + answer if marks.answer else behind + before
    return tokenizer.encode("") + parts


def infill_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end what fills a gap."""
    return tuple(sorted(tokenizer.ids_of(ENDS)))


def _ids(tokenizer: Tokenizer, mark: str) -> list[int]:
    return list(tokenizer.ids_of([mark]))
