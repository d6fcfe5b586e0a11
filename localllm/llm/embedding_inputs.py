"""Inputs and results of embedding models: validation, tokenization, batching and truncation, for encoders and
decoders alike."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from localllm.errors import ContextOverflow, LocalLLMError, UsageError
from localllm.request import to_token_ids

EmbeddingInput = str | Sequence[int]


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The embeddings of several texts, in their order."""

    vectors: np.ndarray  # [texts, dimension] float32, each with norm 1
    tokens: tuple[int, ...]  # tokens computed of each text
    left_out: tuple[int, ...]  # tokens of each text that were truncated


class EmbeddingModel(Protocol):
    """A model that computes embeddings: an Embedder, or an LLM."""

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
    """The part of a tokenizer that InputEncoder uses."""

    special_ids: dict[int, str]

    def encode(self, text: str) -> list[int]: ...
    def min_token_count(self, text: str, limit: int) -> int: ...


@dataclass(frozen=True)
class InputEncoder:
    """Validates and tokenizes inputs before anything is computed."""

    tokenizer: TokenEncoder
    vocab_size: int
    context: int  # tokens
    max_context: int  # tokens, the largest possible context

    def encode(
        self, inputs: EmbeddingInput | Sequence[EmbeddingInput], prefix: str, *, truncate: bool
    ) -> "EncodedInputs":
        """Return the token ids of each input. prefix: put before each text.

        Raises UsageError if there is no input, for an empty one or an invalid token id, ContextOverflow for one
        that is too long unless `truncate` is set.
        """
        texts = split_inputs(inputs)
        if not truncate:
            for text in texts:
                self.check_length(text, prefix)
        encoded = [self.truncate_ids(self.encode_input(text, prefix), truncate=truncate) for text in texts]
        return EncodedInputs([ids for ids, _ in encoded], tuple(left_out for _, left_out in encoded))

    def check_length(self, text: EmbeddingInput, prefix: str) -> None:
        """Raise ContextOverflow before tokenizing a text whose minimum token count exceeds the context."""
        if isinstance(text, str):
            min_tokens = self.tokenizer.min_token_count(prefix + text, self.context)
            if min_tokens > self.context:
                raise self.overflow_error(min_tokens, at_least=True)

    def overflow_error(self, tokens: int, *, at_least: bool = False) -> ContextOverflow:
        context = "more" if at_least else tokens
        limit = f"the model supports {self.max_context}"
        more = f"give --context {context}" if tokens <= self.max_context else limit
        remedy = f"{more}; shorten the text, or allow truncation (--truncate)"
        return ContextOverflow(tokens, self.context, remedy, at_least=at_least)

    def encode_input(self, text: EmbeddingInput, prefix: str) -> list[int]:
        if isinstance(text, str):
            if not text.strip():
                raise UsageError("a text to embed is empty", "leave it out")
            return self.tokenizer.encode(prefix + text)
        ids = to_token_ids(text)
        if not ids:
            raise UsageError("a list of token ids to embed is empty", "leave it out")
        invalid_id = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if invalid_id is not None:
            raise UsageError(
                f"{invalid_id} is not a token of this model", f"its ids are 0 to {self.vocab_size - 1}"
            )
        return ids

    def truncate_ids(self, ids: list[int], *, truncate: bool) -> tuple[list[int], int]:
        """Return the ids that fit, with a special token at the end preserved, and the number of truncated ones."""
        excess = len(ids) - self.context
        if excess <= 0:
            return ids, 0
        if not truncate:
            raise self.overflow_error(len(ids))
        last = ids[-1:] if ids[-1] in self.tokenizer.special_ids else []
        return ids[: self.context - len(last)] + last, excess


@dataclass(frozen=True)
class EncodedInputs:
    """The token ids of each input, and how many of them were truncated."""

    token_ids: list[list[int]]
    left_out: tuple[int, ...]


def split_inputs(inputs: EmbeddingInput | Sequence[EmbeddingInput]) -> list[EmbeddingInput]:
    """Return a list of inputs for one or several; a flat list of token ids is one input."""
    if isinstance(inputs, str):
        return [inputs]
    items = list(inputs)
    if not items:
        raise UsageError("there is nothing to embed", "give a text, token ids, or a list of them")
    if any(isinstance(item, Iterable) for item in items):
        return items  # pyright: ignore[reportReturnType] - `encode_input` checks each
    return [items]  # pyright: ignore[reportReturnType]


def batch_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return batches of input indices, shortest inputs first. A batch has at most `budget` tokens, unless a single
    input is longer."""
    batches: list[list[int]] = []
    remaining = 0
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if not batches or lengths[index] > remaining:
            batches.append([])
            remaining = budget
        batches[-1].append(index)
        remaining -= lengths[index]
    return batches


def never_gone() -> bool:
    """Default of `gone`: the client does not disconnect."""
    return False


def raise_if_gone(gone: Callable[[], bool]) -> None:
    """Raise LocalLLMError if the client has disconnected."""
    if gone():
        raise LocalLLMError("the client no longer waits for the embeddings")


def restore_order(batches: Iterable[tuple[Sequence[int], np.ndarray]], count: int) -> np.ndarray:
    """Return [count, dimension] float32 from pairs of input indices and their vectors."""
    ordered: list[np.ndarray | None] = [None] * count
    for indices, vectors in batches:
        for index, vector in zip(indices, vectors, strict=True):
            ordered[index] = vector
    return np.stack([vector for vector in ordered if vector is not None])


def truncate_dimensions(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """Return the first `dimensions` elements of each vector, normalized again (Matryoshka, Kusupati et al. 2022).

    Raises UsageError for more dimensions than there are.
    """
    if dimensions is None:
        return vectors
    check_dimensions(dimensions, vectors.shape[1])
    first = vectors[:, :dimensions]
    return first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def check_dimensions(requested: int | None, dimension: int) -> None:
    """Raise UsageError if the requested dimensions are not from 1 to `dimension`."""
    if requested is not None and not (type(requested) is int and 0 < requested <= dimension):
        raise UsageError(f"the model does not have {requested!r} dimensions", f"give 1 to {dimension}")


def prompt_prefix(prompts: Mapping[str, str], name: str | None, default: str) -> str:
    """Return the prompt with this name, or the default one. Raises UsageError for an unknown name."""
    if name is None:
        return default
    if name not in prompts:
        raise UsageError(f"this model has no prompt {name!r}", f"it has {', '.join(prompts) or 'none'}")
    return prompts[name]
