"""A model, and all kinds of steps of an engine: prompts, chunks, several sequences, one token of each."""

import torch

from localllm.runtime.engine import Engine
from localllm.runtime.sequence import Sequence
from tests.runtime.test_engine import sequence

ROUNDS = 10_000


def run(engine: Engine, sequences: list[Sequence]) -> list[list[tuple[int, float]]]:
    """Return the tokens of each sequence with their log probabilities."""
    said: dict[int, list[tuple[int, float]]] = {s.request.id: [] for s in sequences}
    for each in sequences:
        engine.add_sequence(each)
    for _ in range(ROUNDS):
        if not engine.has_unfinished_requests:
            return [said[s.request.id] for s in sequences]
        for event in engine.step():
            assert event.error is None, event.error
            if event.token_id is not None:
                assert event.logprob is not None
                said[event.sequence.request.id].append((event.token_id, event.logprob.logprob))
    raise AssertionError("the engine does not get on")


def greedy(prompt: list[int], answer: int) -> Sequence:
    return sequence(prompt, temperature=0, max_tokens=answer, ignore_eos=True, logprobs=1)


def drawn(prompt: list[int], answer: int, seed: int) -> Sequence:
    params = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    return sequence(prompt, seed, max_tokens=answer, ignore_eos=True, logprobs=1, **params)


def text(count: int, vocabulary: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()
