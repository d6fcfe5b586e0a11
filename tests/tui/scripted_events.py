"""Answers as an engine reports them, with a scripted clock, for screens with known numbers.

It includes a stand-in for a model that has only its size, its reads and the texts of its tokens.
"""

import math
import random
from collections.abc import Iterator, Sequence

from localllm.metrics import Candidate, StepReads, StepReport, Stopwatch
from localllm.request import FinishReason, GenerationEvent
from localllm.tui.answer_thread import TimedEvent

STORY = (
    "Once upon a time , there was little dragon who lived in big cave . She loved to count the stars and "
    "one night five of them fell into lake \n\n said moon but nobody heard it <|end|>"
)
WORDS = STORY.split(" ")
BLOCK = 16


class FakeTokenizer:
    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        return "".join(text_of(token) for token in ids if not (skip_special and WORDS[token] == "<|end|>"))


def text_of(token: int) -> str:
    word = WORDS[token]
    return word if word in ",.\n\n<|end|>" else " " + word


class FakeModel:
    """Attributes of a model that the metrics strip and the inspector use."""

    context = 4096
    max_context = 8192
    block_tokens = BLOCK
    reads = StepReads(weights=1.2e9, per_token=65536, kept_per_token=65536, bandwidth=200e9)
    tokenizer = FakeTokenizer()


def candidates(token: int, place: int) -> tuple[Candidate, ...]:
    """Five candidates, the third of which top_k removed, and the last two top_p; the token is not always the most
    likely.
    """
    shares = [(0.96, 0.02), (0.61, 0.22), (0.45, 0.4), (0.3, 0.07)][place % 4]
    others = [(token + 3 + 5 * n) % (len(WORDS) - 1) for n in range(5)]
    first, second = (others[0], token) if place % 4 == 3 else (token, others[0])
    kept = sum(shares)
    rest = 1 - kept
    return (
        Candidate(first, math.log(shares[0]), shares[0] / kept),
        Candidate(second, math.log(shares[1]), shares[1] / kept),
        *(
            Candidate(t, math.log(rest / 2 ** (n + 2)), 0.0, "top_k" if n else "top_p")
            for n, t in enumerate(others[2:])
        ),
    )


def story(steps: int = 40, prompt: int = 600, found: int = 96, drafts: bool = True) -> Iterator[TimedEvent]:
    """Events of an answer: 50 ms in the queue, prefill in chunks of 256 tokens, and then a step about every 8 ms,
    every fifth with four draft tokens. Times start at 100.0.
    """
    chance = random.Random(7)
    now, computed, place = 0.05, found, 0
    clock = [0.0]
    watch = Stopwatch(0.0, clock=lambda: clock[0])

    def report(
        began: float, tokens: int, guesses: Sequence[int] = (), accepted: int = 0, came: Sequence[int] = ()
    ):
        picked = tuple(candidates(token, place + n) for n, token in enumerate(came))
        blocks = -(-computed // BLOCK)
        return StepReport(
            *(began, now, tokens, computed, blocks, found, 1, 0, tuple(guesses), accepted, picked),
            prompt=prompt,
        )

    clock[0] = now
    watch.mark_scheduled()
    while computed < prompt:
        began, piece = now, min(256, prompt - computed)
        now += piece / 5000
        computed += piece
        last = computed == prompt
        came = [0] if last else []
        step = report(began, piece, came=came)
        if last:
            clock[0] = now
            watch.record_token()
        yield 100 + now, GenerationEvent(1, text_of(0) if last else "", tuple(came), step=step)
    place = 1
    for index in range(1, steps):
        began = now
        now += 0.008 + 0.001 * chance.random() + (0.02 if index % 17 == 16 else 0)
        guesses, accepted = [], 0
        if drafts and index % 5 == 4:
            truth = [(place + n) % (len(WORDS) - 1) for n in range(4)]
            accepted = chance.choice([1, 2, 4])
            guesses = [*truth[:accepted], *((t + 9) % (len(WORDS) - 1) for t in truth[accepted:])]
            now += 0.002
        came = [(place + n) % (len(WORDS) - 1) for n in range(accepted + 1)]
        computed += 1 + accepted
        step = report(began, 1 + len(guesses), guesses, accepted, came)
        clock[0] = now
        for n, token in enumerate(came):
            drafted = len(guesses) if n == 0 else 0
            watch.record_token(drafted, accepted=n > 0)
            yield (
                100 + now + 1e-4 + n * 1e-5,
                GenerationEvent(
                    1, text_of(token), (token,), drafted=drafted, accepted=n > 0, step=None if n else step
                ),
            )
        place += len(came)
    began = now
    now += 0.008
    computed += 1
    end = len(WORDS) - 1
    step = report(began, 1, came=[end])
    clock[0] = now
    watch.record_token()
    measured = watch.finish(prompt, found, 0)
    yield 100 + now, GenerationEvent(1, "", (end,), finish_reason=FinishReason.STOP, metrics=measured, step=step)
