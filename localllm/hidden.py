"""Vectors of texts by a model that answers: read, parted into batches, and computed on its engine's thread between
two steps. Knows nothing of requests."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from numpy import ndarray
from torch import Tensor

from localllm.arch.pooling import Pooling
from localllm.embedding import (
    Embeddings,
    Input,
    Reads,
    batches,
    check_dimensions,
    check_wanted,
    in_order,
    prefix_of,
    shortened,
)
from localllm.errors import ContextOverflow, DoesNotFit, LocalLLMError, UsageError
from localllm.runtime.pooling import Pool
from localllm.runtime.state import OutOfBlocks
from localllm.runtime.vectors import vectors_in_pieces
from localllm.worker import Worker

Pooled = Literal["last", "mean"]


def embeddings(
    worker: Worker,
    reads: Reads,
    dimension: int,
    inputs: Input | Sequence[Input],
    *,
    dimensions: int | None,
    truncate: bool,
    prompt: str | None,
    pooling: Pooled,
    gone: Callable[[], bool],
) -> Embeddings:
    """As `LLM.embed`. dimension: how many numbers a vector has."""
    check_dimensions(dimensions, dimension)
    if pooling not in get_args(Pooled):
        raise UsageError(f"there is no pooling {pooling!r}", f"give {' or '.join(get_args(Pooled))}")
    read = reads.token_ids(inputs, prefix_of({}, prompt, ""), truncate=truncate)
    lengths = [len(ids) for ids in read.token_ids]
    pool, budget = Pool(Pooling(pooling)), worker.engine.scheduler.token_budget
    pieces = [
        (places, vectors(worker, [read.token_ids[place] for place in places], pool, gone))
        for places in batches(lengths, budget)
    ]
    return Embeddings(shortened(in_order(pieces, len(lengths)), dimensions), tuple(lengths), read.left_out)


def vectors(worker: Worker, texts: Sequence[Sequence[int]], pool: Pool, gone: Callable[[], bool]) -> ndarray:
    """[texts, hidden_size] float32. Between two pieces the engine does whatever else there is to do."""
    pieces, longest = vectors_in_pieces(worker.engine, texts, pool), max(map(len, texts))

    def further() -> Tensor | None:
        if longest > worker.context:  # there may be less than when they were read
            raise ContextOverflow(longest, worker.context, "ask with a model that has more context")
        return next(pieces)

    try:
        check_wanted(gone)
        while (found := worker.call(further)) is None:
            check_wanted(gone)
    except OutOfBlocks:
        raise DoesNotFit("the cache is full of other sequences", "wait for them, or raise --context") from None
    finally:
        with contextlib.suppress(LocalLLMError):  # closed: its blocks went with the engine
            worker.call(pieces.close)
    if not found.isfinite().all():
        raise LocalLLMError("the model computed NaN or infinity", "try --dtype float32")
    return found.cpu().numpy()
