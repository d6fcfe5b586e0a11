"""Vectors of texts by a model that answers: read, parted into batches, and computed on its engine's thread between
two steps. Knows nothing of requests."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from numpy import ndarray
from torch import Tensor

from localllm.arch.pooling import Pooling
from localllm.errors import ContextOverflow, DoesNotFit, LocalLLMError, UsageError
from localllm.llm.embedding_inputs import (
    EmbeddingInput,
    Embeddings,
    InputEncoder,
    batch_by_length,
    check_dimensions,
    prompt_prefix,
    raise_if_gone,
    restore_order,
    truncate_dimensions,
)
from localllm.llm.worker import Worker
from localllm.runtime.kv_cache.sequence_state import OutOfBlocks
from localllm.runtime.pooling import Pooler
from localllm.runtime.vectors import embed_in_chunks

PoolingType = Literal["last", "mean"]


def embed_inputs(
    worker: Worker,
    input_encoder: InputEncoder,
    hidden_size: int,
    inputs: EmbeddingInput | Sequence[EmbeddingInput],
    *,
    dimensions: int | None,
    truncate: bool,
    prompt: str | None,
    pooling: PoolingType,
    gone: Callable[[], bool],
) -> Embeddings:
    """As `LLM.embed`. hidden_size: how many numbers a vector has."""
    check_dimensions(dimensions, hidden_size)
    if pooling not in get_args(PoolingType):
        raise UsageError(f"there is no pooling {pooling!r}", f"give {' or '.join(get_args(PoolingType))}")
    read = input_encoder.encode(inputs, prompt_prefix({}, prompt, ""), truncate=truncate)
    lengths = [len(ids) for ids in read.token_ids]
    pool, budget = Pooler(Pooling(pooling)), worker.engine.token_budget
    pieces = [
        (places, embed_batch(worker, [read.token_ids[place] for place in places], pool, gone))
        for places in batch_by_length(lengths, budget)
    ]
    return Embeddings(
        truncate_dimensions(restore_order(pieces, len(lengths)), dimensions), tuple(lengths), read.left_out
    )


def embed_batch(
    worker: Worker, texts: Sequence[Sequence[int]], pooler: Pooler, gone: Callable[[], bool]
) -> ndarray:
    """[texts, hidden_size] float32. Between two pieces the engine does whatever else there is to do."""
    pieces, longest = embed_in_chunks(worker.engine, texts, pooler), max(map(len, texts))

    def further() -> Tensor | None:
        if longest > worker.context:  # there may be less than when they were read
            raise ContextOverflow(longest, worker.context, "ask with a model that has more context")
        return next(pieces)

    try:
        raise_if_gone(gone)
        while (found := worker.call(further)) is None:
            raise_if_gone(gone)
    except OutOfBlocks:
        raise DoesNotFit("the cache is full of other sequences", "wait for them, or raise --context") from None
    finally:
        with contextlib.suppress(LocalLLMError):  # closed: its blocks went with the engine
            worker.call(pieces.close)
    if not found.isfinite().all():
        raise LocalLLMError("the model computed NaN or infinity", "try --dtype float32")
    return found.cpu().numpy()
