"""The proofs of every family, each of which returns the largest difference of a logit. Chunks, sequence operations
and batches are compared with one forward pass of the same engine over the same tokens.
"""

import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import SequenceState
from tests.models.families import FAMILIES, NOT_IN_GGUF, OTHERWISE_IN_GGUF
from tests.tiny import CPU, make_checkpoint, make_engine

LENGTH = 70


@dataclass(frozen=True)
class Subject:
    """A random checkpoint, and the transformers model that wrote it."""

    name: str
    folder: Path
    theirs: Any
    device: torch.device = CPU


@dataclass(frozen=True)
class Proof:
    title: str  # of the column in docs/models.md
    measure: Callable[[Subject], float | None]  # None: makes no sense for this family
    tolerance: float


def token_ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def difference(got: Tensor, expected: Tensor) -> float:
    got, expected = got.cpu(), expected.cpu()
    assert got.isfinite().all()
    assert expected.std() > 0.3  # a dead model would agree with anything
    return (got - expected).abs().max().item()


def against_transformers(subject: Subject) -> float:
    ids = token_ids(LENGTH)
    engine = make_engine(subject.folder, device=subject.device, context=LENGTH)
    got = engine.logits(ids)
    engine.pool.check_invariants()
    return difference(got, logits_of_transformers(subject.theirs, ids))


def logits_of_transformers(model: Any, ids: list[int]) -> Tensor:
    """Logits of transformers. A delta net runs token by token, since the error of its chunked form is 3e-4."""
    if not hasattr(model.config.get_text_config(), "linear_num_key_heads"):
        return model(torch.tensor([ids])).logits[0]
    past, logits = None, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.24 renames past_key_values
        for token in ids:
            out = model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits.append(out.logits[0])
    return torch.cat(logits)


def from_gguf(subject: Subject) -> float | None:
    """Compare the model as a GGUF file with the transformers model. None if GGUF does not support the family."""
    from tests.gguf_writer import write_gguf  # imports gguf, which may be missing where a GPU alone is tested

    if subject.name in NOT_IN_GGUF:
        return None
    folder, theirs = subject.folder, subject.theirs
    if changes := OTHERWISE_IN_GGUF.get(subject.name):
        kind, usual = FAMILIES[subject.name]
        folder = subject.folder / "otherwise"
        theirs = make_checkpoint(folder, kind, **{**usual, **changes})
    write_gguf(folder, folder / "model.gguf")
    ids = token_ids(LENGTH)
    engine = make_engine(folder / "model.gguf", device=subject.device, context=LENGTH)
    return difference(engine.logits(ids), logits_of_transformers(theirs, ids))


def in_chunks(subject: Subject) -> float:
    """Compute two sequences in uneven, alternating chunks."""
    engine = make_engine(subject.folder, device=subject.device, block_size=4)
    rng = random.Random(0)
    texts = [token_ids(LENGTH, seed) for seed in (1, 2)]
    states = [SequenceState(engine.pool) for _ in texts]
    worst = 0.0
    expected = [engine.logits(text) for text in texts]
    while any(state.length < LENGTH for state in states):
        for text, state, whole in zip(texts, states, expected, strict=True):
            begin = state.length
            end = min(LENGTH, begin + rng.choice([1, 2, 5, 17]))
            if begin < end:
                worst = max(worst, difference(extend(engine, [state], [text[begin:end]]), whole[begin:end]))
    return worst


def in_batches(subject: Subject) -> float:
    """Compute four sequences in one step, some with many tokens and some with one."""
    engine = make_engine(subject.folder, device=subject.device, block_size=4)
    texts = [token_ids(count, seed) for seed, count in enumerate((1, 9, 30, 23))]
    states = [SequenceState(engine.pool) for _ in texts]
    alone = [engine.logits(text) for text in texts]
    extend(engine, states[2:], [texts[2][:-1], texts[3][:-1]])
    together = extend(engine, states, [texts[0], texts[1], texts[2][-1:], texts[3][-1:]])
    return difference(together, torch.cat((*alone[:2], alone[2][-1:], alone[3][-1:])))


def under_the_verbs(subject: Subject) -> float:
    """Apply random operations to sequences with common prefixes."""
    engine = make_engine(subject.folder, device=subject.device, blocks=200, block_size=4)
    rng = random.Random(0)
    live: list[tuple[SequenceState, list[int]]] = []
    worst = 0.0
    for step in range(60):
        state, tokens = rng.choice(live) if live else (None, [])
        verb = rng.choice(
            ["begin", "extend", "extend", "extend", "rollback", "remember", "fork", "snapshot", "free"]
        )
        if verb == "begin" or state is None:
            prompt = token_ids(rng.randrange(1, 20))
            fresh = SequenceState(engine.pool, prompt)
            live.append((fresh, prompt[: fresh.length]))
        elif verb == "extend" and state.length < 60:
            tokens += (new := token_ids(rng.randrange(1, 12), step))
            saves = rng.sample(range(state.length + 1, len(tokens) + 1), rng.randrange(2))
            got = extend(engine, [state], [tokens[state.length :]], saves)
            worst = max(worst, difference(got[-len(new) :], engine.logits(tokens)[-len(new) :]))
        elif verb == "rollback":
            del tokens[state.length :]
            state.rollback(rng.randrange(state.length + 1))
            del tokens[state.length :]
        elif verb == "remember":
            state.cache_full_blocks(tokens)
        elif verb == "fork":
            live.append((state.fork(), list(tokens)))
        elif verb == "snapshot":
            snapshot = state.snapshot()
            live.append((snapshot.fork(), list(tokens)))
            snapshot.free()
        elif verb == "free":
            state.free()
            live.remove((state, tokens))
    engine.pool.check_invariants()
    for state, _ in live:
        state.free()
    engine.pool.check_all_free()
    return worst


def extend(
    engine: Engine, states: list[SequenceState], tokens: list[list[int]], saves: Iterable[int] = ()
) -> Tensor:
    """Compute tokens in one step, in which the first state is saved at some lengths; return the logits of all
    tokens.
    """
    for state, new in zip(states, tokens, strict=True):
        state.extend(len(new))
    for length in saves:
        states[0].plan_save(length)
    every = list(range(sum(map(len, tokens))))
    return engine.runner.launch(
        Batch.from_states(states, tokens, every, engine.runner.device, engine.pool.drain_copies())
    )


PROOFS = (
    Proof("transformers", against_transformers, 2e-4),
    Proof("as GGUF", from_gguf, 2e-4),
    Proof("five verbs", under_the_verbs, 1e-4),
    Proof("chunked prefill", in_chunks, 1e-4),
    Proof("batch invariance", in_batches, 1e-4),
)
