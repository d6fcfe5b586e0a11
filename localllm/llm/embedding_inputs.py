"""Texts in, vectors out: what is asked of any model that embeds, and what it gives.

Knows nothing of how a model computes them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from localllm.errors import ContextOverflow, LocalLLMError, UsageError
from localllm.request import to_token_ids

EmbeddingInput = str | Sequence[int]


@dataclass(frozen=True, eq=False)
class Embeddings:
    """One vector a text, in their order."""

    vectors: np.ndarray  # [texts, dimension] float32, each of length one
    tokens: tuple[int, ...]  # of each text, as the model read it
    left_out: tuple[int, ...]  # tokens of each text that the model has no room for, cut off at its end


class EmbeddingModel(Protocol):
    """A model that gives vectors: an Embedder, or an LLM."""

    @property
    def name(self) -> str: ...
    def embed(
        self,
        inputs: EmbeddingInput | Sequence[EmbeddingInput],
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        prompt: str | None = None,
        gone: Callable[[], bool] = ...,
    ) -> Embeddings: ...


class TokenEncoder(Protocol):
    """What is needed of a tokenizer."""

    special_ids: dict[int, str]

    def encode(self, text: str) -> list[int]: ...
    def min_token_count(self, text: str, limit: int) -> int: ...


@dataclass(frozen=True)
class InputEncoder:
    """What a model takes, for checks before anything is computed."""

    tokenizer: TokenEncoder
    vocab_size: int
    context: int  # tokens
    max_context: int  # tokens that a context could have at most

    def encode(
        self, inputs: EmbeddingInput | Sequence[EmbeddingInput], prefix: str, *, truncate: bool
    ) -> "EncodedInputs":
        """Raises UsageError for no input, an empty one or an id of no token, ContextOverflow for one that is too
        long, unless it may be cut."""
        texts = split_inputs(inputs)
        if not truncate:
            for text in texts:
                self.check_length(text, prefix)
        cut = [self.truncate_ids(self.encode_input(each, prefix), truncate=truncate) for each in texts]
        return EncodedInputs([ids for ids, _ in cut], tuple(left for _, left in cut))

    def check_length(self, text: EmbeddingInput, prefix: str) -> None:
        """Raises ContextOverflow for one that is too long in any case, before it is tokenized."""
        if isinstance(text, str):
            fewest = self.tokenizer.min_token_count(prefix + text, self.context)
            if fewest > self.context:
                raise self.overflow_error(fewest, at_least=True)

    def overflow_error(self, tokens: int, *, at_least: bool = False) -> ContextOverflow:
        asked = "more" if at_least else tokens
        more = f"give --context {asked}" if tokens <= self.max_context else f"the model reads {self.max_context}"
        remedy = f"{more}; cut the text, or allow that it is truncated (--truncate)"
        return ContextOverflow(tokens, self.context, remedy, at_least=at_least)

    def encode_input(self, text: EmbeddingInput, prefix: str) -> list[int]:
        if isinstance(text, str):
            if not text.strip():
                raise UsageError("a text to embed is empty", "leave it out")
            return self.tokenizer.encode(prefix + text)
        ids = to_token_ids(text)
        if not ids:
            raise UsageError("a list of token ids to embed is empty", "leave it out")
        beyond = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if beyond is not None:
            raise UsageError(f"{beyond} is no token of this model", f"its ids are 0 to {self.vocab_size - 1}")
        return ids

    def truncate_ids(self, ids: list[int], *, truncate: bool) -> tuple[list[int], int]:
        """As many as there is room for, and how many are left out. What the tokenizer puts last stays last."""
        over = len(ids) - self.context
        if over <= 0:
            return ids, 0
        if not truncate:
            raise self.overflow_error(len(ids))
        last = ids[-1:] if ids[-1] in self.tokenizer.special_ids else []
        return ids[: self.context - len(last)] + last, over


@dataclass(frozen=True)
class EncodedInputs:
    token_ids: list[list[int]]
    left_out: tuple[int, ...]


def split_inputs(inputs: EmbeddingInput | Sequence[EmbeddingInput]) -> list[EmbeddingInput]:
    """Several texts, or one of them; token ids alone are one text."""
    if isinstance(inputs, str):
        return [inputs]
    found = list(inputs)
    if not found:
        raise UsageError("there is nothing to embed", "give a text, token ids, or a list of them")
    if any(isinstance(each, Iterable) for each in found):
        return found  # pyright: ignore[reportReturnType] - each is checked where it is read
    return [found]  # pyright: ignore[reportReturnType]


def batch_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Places of texts that are computed together, the shortest first: so many tokens as fit the budget, but for a
    text that alone is longer."""
    found: list[list[int]] = []
    room = 0
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        if not found or lengths[place] > room:
            found.append([])
            room = budget
        found[-1].append(place)
        room -= lengths[place]
    return found


def never_gone() -> bool:
    return False


def raise_if_gone(gone: Callable[[], bool]) -> None:
    """Raises LocalLLMError where whoever asked has gone."""
    if gone():
        raise LocalLLMError("nobody waits for the vectors any more")


def restore_order(batches: Iterable[tuple[Sequence[int], np.ndarray]], count: int) -> np.ndarray:
    """[count, dimension] float32 of batches' places and vectors."""
    rows: list[np.ndarray | None] = [None] * count
    for places, vectors in batches:
        for place, vector in zip(places, vectors, strict=True):
            rows[place] = vector
    return np.stack([row for row in rows if row is not None])


def truncate_dimensions(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first numbers of each, of length one again (Kusupati et al. 2022, for models trained so).

    Raises UsageError for more than there are.
    """
    if dimensions is None:
        return vectors
    check_dimensions(dimensions, vectors.shape[1])
    first = vectors[:, :dimensions]
    return first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def check_dimensions(requested: int | None, dimension: int) -> None:
    if requested is not None and not (type(requested) is int and 0 < requested <= dimension):
        raise UsageError(f"{requested!r} dimensions are asked for", f"its vectors have {dimension}")


def prompt_prefix(prompts: Mapping[str, str], name: str | None, default: str) -> str:
    """What is put before a text. Raises UsageError for the name of no prompt."""
    if name is None:
        return default
    if name not in prompts:
        raise UsageError(f"this model has no prompt {name!r}", f"it has {', '.join(prompts) or 'none'}")
    return prompts[name]
