"""Embeddings of texts by a decoder, next to the engine's other work: chunk by chunk, so that answers continue
between chunks. Call it on the engine's thread only.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import OutOfBlocks, SequenceState
from localllm.runtime.pooling import Pooler

TokenIds = Sequence[int]


def embed_in_chunks(engine: Engine, texts: Sequence[TokenIds], pooler: Pooler) -> Generator[Tensor | None]:
    """Yield None after each chunk except the last, then [texts, hidden] float32 of length one.

    Starts over if the engine's caches are replaced meanwhile. Raises OutOfBlocks if the KV cache has too few free
    blocks for the tokens.
    """
    pool, states, accumulated = engine.pool, *new_states(engine, texts)
    try:
        while work := next_chunk(texts, states, engine.scheduler.prompt_budget):
            for index, tokens in work:
                states[index].extend(len(tokens))
            running, chunks = [states[index] for index, _ in work], [list(tokens) for _, tokens in work]
            batch = Batch.from_states(running, chunks, [], engine.device, engine.pool.drain_copies())
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
