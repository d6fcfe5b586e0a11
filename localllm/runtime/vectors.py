"""Vectors of texts by a decoder, beside whatever else its engine does: piece by piece, so that answers go on
between them. To be called on the engine's thread alone.
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
    """None after each piece of the token budget but for the last: then [texts, hidden] float32 of length one.

    Where the engine has other caches meanwhile, they begin anew. Raises OutOfBlocks where the cache has no room
    for the tokens beside those of others.
    """
    held, states, kept = engine.pool, *new_states(engine, texts)
    try:
        while work := next_chunk(texts, states, engine.scheduler.prompt_budget):
            for place, part in work:
                states[place].extend(len(part))
            running, parts = [states[place] for place, _ in work], [list(part) for _, part in work]
            batch = Batch.from_states(running, parts, [], engine.device, engine.pool.drain_copies())
            rows = engine.runner.hidden_states(batch).split([len(part) for part in parts])
            engine.scheduler.discard_timing()
            for (place, _), x in zip(work, rows, strict=True):
                kept[place] = pooler.accumulate(kept[place], x)
            if any(state.length < len(text) for state, text in zip(states, texts, strict=True)):
                yield None
            if engine.pool is not held:  # with its caches, in which the pieces until now were
                held, states, kept = engine.pool, *new_states(engine, texts)
        sums = [x for x in kept if x is not None]
        yield pooler.project_and_normalize(
            torch.stack([pooler.average(x, len(ids)) for x, ids in zip(sums, texts, strict=True)])
        )
    except OutOfBlocks:
        raise  # before anything was begun
    except Exception:
        engine.pool.reset_prefix_cache()  # others go on, and what was to be put aside may not have been
        raise
    finally:
        for state in states:
            state.free()


def new_states(engine: Engine, texts: Sequence[TokenIds]) -> tuple[list[SequenceState], list[Tensor | None]]:
    """Of each text nothing computed yet."""
    return [SequenceState(engine.pool) for _ in texts], [None] * len(texts)


def next_chunk(
    texts: Sequence[TokenIds], states: Sequence[SequenceState], budget: int
) -> list[tuple[int, TokenIds]]:
    """The texts that go on in the next piece, by their places, and with which tokens."""
    found = []
    for place, (text, state) in enumerate(zip(texts, states, strict=True)):
        part = text[state.length : state.length + budget]
        if part:
            found.append((place, part))
            budget -= len(part)
    return found
