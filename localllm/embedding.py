"""Texts in, vectors out: what is asked of any model that embeds, and what it gives.

Knows nothing of how a model computes them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from localllm.errors import ContextOverflow, LocalLLMError, UsageError
from localllm.request import token_ids_of

Input = str | Sequence[int]


@dataclass(frozen=True, eq=False)
class Embeddings:
    """One vector a text, in their order."""

    vectors: np.ndarray  # [texts, dimension] float32, each of length one
    tokens: tuple[int, ...]  # of each text, as the model read it
    left_out: tuple[int, ...]  # tokens of each text that the model has no room for, cut off at its end


class Embeds(Protocol):
    """A model that gives vectors: an Embedder, or an LLM."""

    @property
    def name(self) -> str: ...
    def embed(
        self,
        inputs: Input | Sequence[Input],
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        prompt: str | None = None,
        gone: Callable[[], bool] = ...,
    ) -> Embeddings: ...


class Encodes(Protocol):
    """What is needed of a tokenizer."""

    special_ids: dict[int, str]

    def encode(self, text: str) -> list[int]: ...
    def fewest_tokens(self, text: str, most: int) -> int: ...


@dataclass(frozen=True)
class Reads:
    """What a model takes, for checks before anything is computed."""

    tokenizer: Encodes
    vocab_size: int
    context: int  # tokens
    longest: int  # tokens that a context could have at most

    def token_ids(self, inputs: Input | Sequence[Input], prefix: str, *, truncate: bool) -> "Read":
        """Raises UsageError for no input, an empty one or an id of no token, ContextOverflow for one that is too
        long, unless it may be cut."""
        texts = parted(inputs)
        if not truncate:
            for text in texts:
                self.check_length(text, prefix)
        cut = [self.fitted(self.ids_of(each, prefix), truncate=truncate) for each in texts]
        return Read([ids for ids, _ in cut], tuple(left for _, left in cut))

    def check_length(self, text: Input, prefix: str) -> None:
        """Raises ContextOverflow for one that is too long in any case, before it is tokenized."""
        if isinstance(text, str):
            fewest = self.tokenizer.fewest_tokens(prefix + text, self.context)
            if fewest > self.context:
                raise self.overflow(fewest, at_least=True)

    def overflow(self, tokens: int, *, at_least: bool = False) -> ContextOverflow:
        asked = "more" if at_least else tokens
        more = f"give --context {asked}" if tokens <= self.longest else f"the model reads {self.longest}"
        remedy = f"{more}; cut the text, or allow that it is truncated (--truncate)"
        return ContextOverflow(tokens, self.context, remedy, at_least=at_least)

    def ids_of(self, text: Input, prefix: str) -> list[int]:
        if isinstance(text, str):
            if not text.strip():
                raise UsageError("a text to embed is empty", "leave it out")
            return self.tokenizer.encode(prefix + text)
        ids = token_ids_of(text)
        if not ids:
            raise UsageError("a list of token ids to embed is empty", "leave it out")
        beyond = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if beyond is not None:
            raise UsageError(f"{beyond} is no token of this model", f"its ids are 0 to {self.vocab_size - 1}")
        return ids

    def fitted(self, ids: list[int], *, truncate: bool) -> tuple[list[int], int]:
        """As many as there is room for, and how many are left out. What the tokenizer puts last stays last."""
        over = len(ids) - self.context
        if over <= 0:
            return ids, 0
        if not truncate:
            raise self.overflow(len(ids))
        last = ids[-1:] if ids[-1] in self.tokenizer.special_ids else []
        return ids[: self.context - len(last)] + last, over


@dataclass(frozen=True)
class Read:
    token_ids: list[list[int]]
    left_out: tuple[int, ...]


def parted(inputs: Input | Sequence[Input]) -> list[Input]:
    """Several texts, or one of them; token ids alone are one text."""
    if isinstance(inputs, str):
        return [inputs]
    found = list(inputs)
    if not found:
        raise UsageError("there is nothing to embed", "give a text, token ids, or a list of them")
    if any(isinstance(each, Iterable) for each in found):
        return found  # pyright: ignore[reportReturnType] - each is checked where it is read
    return [found]  # pyright: ignore[reportReturnType]


def batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
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


def never() -> bool:
    return False


def check_wanted(gone: Callable[[], bool]) -> None:
    """Raises LocalLLMError where whoever asked has gone."""
    if gone():
        raise LocalLLMError("nobody waits for the vectors any more")


def in_order(pieces: Iterable[tuple[Sequence[int], np.ndarray]], count: int) -> np.ndarray:
    """[count, dimension] float32 of batches' places and vectors."""
    rows: list[np.ndarray | None] = [None] * count
    for places, vectors in pieces:
        for place, vector in zip(places, vectors, strict=True):
            rows[place] = vector
    return np.stack([row for row in rows if row is not None])


def shortened(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first numbers of each, of length one again (Kusupati et al. 2022, for models trained so).

    Raises UsageError for more than there are.
    """
    if dimensions is None:
        return vectors
    check_dimensions(dimensions, vectors.shape[1])
    first = vectors[:, :dimensions]
    return first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def check_dimensions(asked: int | None, dimension: int) -> None:
    if asked is not None and not (type(asked) is int and 0 < asked <= dimension):
        raise UsageError(f"{asked!r} dimensions are asked for", f"its vectors have {dimension}")


def prefix_of(prompts: Mapping[str, str], name: str | None, usual: str) -> str:
    """What is put before a text. Raises UsageError for the name of no prompt."""
    if name is None:
        return usual
    if name not in prompts:
        raise UsageError(f"this model has no prompt {name!r}", f"it has {', '.join(prompts) or 'none'}")
    return prompts[name]
