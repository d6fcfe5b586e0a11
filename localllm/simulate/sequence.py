"""Sequences of a simulation: lengths and identities of their tokens, without the tokens themselves."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import cast

from localllm.metrics import Stopwatch
from localllm.request import NO_NAMES, PrefixNames, Request, SamplingParams
from localllm.runtime.sequence import Sequence

NO_END_IDS = frozenset[int]()
# The reservation for an answer depends on whether a request limits it, and not on how: `Sequence.max_len` does.
LIMITED, UNLIMITED = SamplingParams(max_tokens=1), SamplingParams()


class TokenSpans:
    """A list of tokens as spans: (id, length) of texts that are equal wherever their ids are.

    A slice is not the tokens but what identifies them, so that a block's key in the prefix cache takes two numbers
    instead of sixteen.
    """

    __slots__ = ("ends", "ids", "length")

    def __init__(self, spans: Iterable[tuple[int, int]]):
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.length = 0
        for span_id, length in spans:
            if length:
                self.length += length
                self.ids.append(span_id)
                self.ends.append(self.length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: slice) -> tuple[int, ...]:
        """Return span ids and positions within them. The last span continues beyond its end, as an answer does."""
        start, stop, ends = index.start, index.stop, self.ends
        last = len(ends) - 1
        i = min(bisect_right(ends, start), last)
        begin = ends[i - 1] if i else 0
        if i == last or stop <= ends[i]:
            return self.ids[i], start - begin
        key: list[int] = []
        while start < stop:
            begin = ends[i - 1] if i else 0
            end = stop if i == last else min(stop, ends[i])
            key += (self.ids[i], start - begin, end - start)
            start, i = end, i + 1
        return tuple(key)


class SimulatedSequence(Sequence):
    """A sequence whose answer has a known length. `answer_id` identifies the answer's text for later turns."""

    def __init__(
        self,
        number: int,
        arrival: float,
        prompt: Iterable[tuple[int, int]],
        answer_len: int,
        max_len: int,
        stopwatch: Stopwatch,
        answer_id: int,
        limited: bool = True,
        prefix_names: PrefixNames = NO_NAMES,
    ):
        """number: order of arrival; prompt: spans, as in `TokenSpans`; max_len: maximum tokens of prompt and
        answer, as the request limits them; limited: whether it does"""
        tokens = TokenSpans([*prompt, (answer_id, 1)])
        tokens.length -= 1  # the span of the answer is empty at first
        tokens.ends[-1] -= 1
        self.answer_len = answer_len
        self.produced = 0  # tokens of the answer
        self.first_token_at = self.last_token_at = -1.0
        self.joined_at = -1  # step after which it joined the group of decoding sequences; -1: not a member
        self.reserved_blocks: int | None = None  # of a member, if they are constant
        self.prompt_spans = tokens
        request = Request((), LIMITED if limited else UNLIMITED, arrival, id=number, prefix_names=prefix_names)
        super().__init__(request, 0, NO_END_IDS, max_len, stopwatch)

    def __post_init__(self) -> None:
        self.token_ids = cast(list[int], self.prompt_spans)
        self.prompt_len = self.prompt_spans.length
        self.end_ids = ()
