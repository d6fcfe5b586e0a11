"""Vectors of texts by a decoder, beside whatever else its engine does: piece by piece, so that answers go on
between them. To be called on the engine's thread alone.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.engine import Engine
from localllm.runtime.pooling import Pool
from localllm.runtime.state import OutOfBlocks, SequenceState

TokenIds = Sequence[int]


def vectors_in_pieces(engine: Engine, texts: Sequence[TokenIds], pool: Pool) -> Generator[Tensor | None]:
    """None after each piece of the token budget but for the last: then [texts, hidden] float32 of length one.

    Where the engine has other caches meanwhile, they begin anew. Raises OutOfBlocks where the cache has no room
    for the tokens beside those of others.
    """
    held, states, kept = engine.pool, *begun(engine, texts)
    try:
        while work := next_piece(texts, states, budget_of(engine)):
            for place, part in work:
                states[place].extend(len(part))
            running, parts = [states[place] for place, _ in work], [list(part) for _, part in work]
            batch = Batch.of(running, parts, [], engine.runner.device, engine.pool.drain_copies())
            rows = engine.runner.hidden(batch).split([len(part) for part in parts])
            engine.untimed()
            for (place, _), x in zip(work, rows, strict=True):
                kept[place] = pool.gathered(kept[place], x)
            if any(state.length < len(text) for state, text in zip(states, texts, strict=True)):
                yield None
            if engine.pool is not held:  # with its caches, in which the pieces until now were
                held, states, kept = engine.pool, *begun(engine, texts)
        sums = [x for x in kept if x is not None]
        yield pool.finished(torch.stack([pool.shared(x, len(ids)) for x, ids in zip(sums, texts, strict=True)]))
    except OutOfBlocks:
        raise  # before anything was begun
    except Exception:
        engine.pool.forget_all()  # others go on, and what was to be put aside may not have been
        raise
    finally:
        for state in states:
            state.free()


def begun(engine: Engine, texts: Sequence[TokenIds]) -> tuple[list[SequenceState], list[Tensor | None]]:
    """Of each text nothing computed yet."""
    return [SequenceState(engine.pool) for _ in texts], [None] * len(texts)


def budget_of(engine: Engine) -> int:
    """Tokens of a piece: as few as those who wait for an answer meanwhile have patience for."""
    if engine.runner.asynchronous or not engine.scheduler.running:
        return engine.scheduler.token_budget
    return engine.chunk.size(streaming=engine.scheduler.streaming > 0)


def next_piece(
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
