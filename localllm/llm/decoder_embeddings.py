"""Embeddings of texts by a decoder, computed in chunks on its engine's thread, so that answers continue between
chunks."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Literal, get_args

import torch
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
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import OutOfBlocks, SequenceState
from localllm.runtime.pooling import Pooler

TokenIds = Sequence[int]
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
    """Return the embeddings of the inputs, as `LLM.embed`. hidden_size: their dimension."""
    check_dimensions(dimensions, hidden_size)
    if pooling not in get_args(PoolingType):
        raise UsageError(f"there is no pooling {pooling!r}", f"give {' or '.join(get_args(PoolingType))}")
    encoded = input_encoder.encode(inputs, prompt_prefix({}, prompt, ""), truncate=truncate)
    lengths = [len(ids) for ids in encoded.token_ids]
    pooler, budget = Pooler(Pooling(pooling)), worker.engine.token_budget
    batches = [
        (indices, embed_batch(worker, [encoded.token_ids[index] for index in indices], pooler, gone))
        for indices in batch_by_length(lengths, budget)
    ]
    return Embeddings(
        truncate_dimensions(restore_order(batches, len(lengths)), dimensions), tuple(lengths), encoded.left_out
    )


def embed_batch(
    worker: Worker, texts: Sequence[Sequence[int]], pooler: Pooler, gone: Callable[[], bool]
) -> ndarray:
    """Return [texts, hidden_size] float32. Between chunks, the engine's thread continues its other work."""
    chunks, longest = embed_in_chunks(worker.engine, texts, pooler), max(map(len, texts))

    def compute_chunk() -> Tensor | None:
        if longest > worker.context:  # it may have been resized since the inputs were encoded
            raise ContextOverflow(longest, worker.context, "use a model with more context")
        return next(chunks)

    try:
        raise_if_gone(gone)
        while (vectors := worker.call(compute_chunk)) is None:
            raise_if_gone(gone)
    except OutOfBlocks:
        raise DoesNotFit("the cache is full of other sequences", "wait for them, or raise --context") from None
    finally:
        with contextlib.suppress(LocalLLMError):  # closed: its blocks were freed with the engine
            worker.call(chunks.close)
    if not vectors.isfinite().all():
        raise LocalLLMError("the model computed NaN or infinity", "try --dtype float32")
    return vectors.cpu().numpy()


def embed_in_chunks(engine: Engine, texts: Sequence[TokenIds], pooler: Pooler) -> Generator[Tensor | None]:
    """Yield None after each chunk except the last, then [texts, hidden] float32 with norm 1, on the engine's
    thread.

    Starts over if the engine's caches are replaced meanwhile. Raises OutOfBlocks if the KV cache has too few free
    blocks for the tokens.
    """
    pool, states, accumulated = engine.pool, *new_states(engine, texts)
    try:
        while work := next_chunk(texts, states, engine.scheduler.prompt_budget):
            for index, tokens in work:
                states[index].extend(len(tokens))
            running, chunks = [states[index] for index, _ in work], [list(tokens) for _, tokens in work]
            batch = engine.runner.make_batch(running, chunks, [], engine.pool.drain_copies(), hidden=True)
            outputs = engine.runner.hidden_states(batch).split([len(tokens) for tokens in chunks])
            engine.scheduler.discard_timing()
            for (index, _), x in zip(work, outputs, strict=True):
                accumulated[index] = pooler.accumulate(accumulated[index], x)
            if any(state.length < len(text) for state, text in zip(states, texts, strict=True)):
                yield None
            if engine.pool is not pool:  # its caches were replaced, and with them the chunks computed so far
                pool, states, accumulated = engine.pool, *new_states(engine, texts)
        finished = [x for x in accumulated if x is not None]
        yield pooler.project_and_normalize(
            torch.stack([pooler.average(x, len(ids)) for x, ids in zip(finished, texts, strict=True)])
        )
    except OutOfBlocks:
        raise
    except Exception:
        # Other sequences continue, and blocks that were to be offloaded may not have been copied.
        engine.pool.reset_prefix_cache()
        raise
    finally:
        for state in states:
            state.free()


def new_states(engine: Engine, texts: Sequence[TokenIds]) -> tuple[list[SequenceState], list[Tensor | None]]:
    """Return an empty sequence state and an empty accumulator for each text."""
    return [SequenceState(engine.pool) for _ in texts], [None] * len(texts)


def next_chunk(
    texts: Sequence[TokenIds], states: Sequence[SequenceState], budget: int
) -> list[tuple[int, TokenIds]]:
    """Return the next tokens of the texts up to the budget, as pairs of a text's index and its tokens."""
    chunks = []
    for index, (text, state) in enumerate(zip(texts, states, strict=True)):
        tokens = text[state.length : state.length + budget]
        if tokens:
            chunks.append((index, tokens))
            budget -= len(tokens)
    return chunks
