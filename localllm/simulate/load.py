"""Requests of a simulation: when they arrive, how long they are, and which parts of their prompts are equal.

An open load arrives regardless of answers, at random or as a trace says. In a closed load, each user reads an
answer and thinks before the next request.
"""

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from localllm.errors import UsageError

SYSTEM_PROMPT_ID = 1  # span ids of texts that many prompts share are below FIRST_OWN_ID
FIRST_OWN_ID = 2**32
MAX_TOKENS = 2**20


class Turn(NamedTuple):
    """A request of a load. `answer_id` identifies the text of the answer, which a later turn may contain."""

    arrival: float
    prompt: tuple[tuple[int, int], ...]  # spans: id of a text and its tokens
    answer_len: int
    answer_id: int
    user: int = 0
    number: int = 1  # of the conversation

    @property
    def prompt_len(self) -> int:
        return sum(length for _, length in self.prompt)


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths in tokens, by their median and the standard deviation of the logarithm."""

    median: float
    sigma: float = 0.0

    def __post_init__(self) -> None:
        if not (1 <= self.median <= MAX_TOKENS and 0 <= self.sigma <= 3):
            raise UsageError(
                f"{self.median:g} tokens with a spread of {self.sigma:g} are not possible",
                f"give 1 to {MAX_TOKENS} tokens, and a spread up to 3",
            )

    @classmethod
    def parse(cls, text: str, flag: str) -> "Lengths":
        """Parse `512` or `512~0.8`, a median and a spread. Raises UsageError."""
        median, _, sigma = text.partition("~")
        try:
            return cls(float(median), float(sigma or 0.0))
        except ValueError:
            raise UsageError(f"{flag} is {text!r}", "give tokens such as 512, or with a spread: 512~0.8") from None

    def draw(self, rng: random.Random) -> int:
        if not self.sigma:
            return round(self.median)
        return max(1, min(MAX_TOKENS, round(self.median * math.exp(self.sigma * rng.gauss(0, 1)))))

    def scaled(self, factor: float) -> "Lengths":
        return Lengths(max(1.0, self.median * factor), self.sigma)

    def __str__(self) -> str:
        return f"{self.median:g}" + (f" (median, log-normal {self.sigma:g})" if self.sigma else "")


class Load(ABC):
    """The source of a simulation's requests, for one run."""

    depends_on_answers = False  # whether requests follow answers

    @abstractmethod
    def next_at(self) -> float:
        """Return when the next request arrives, as far as is known; infinity for none."""

    @abstractmethod
    def pop(self) -> Turn:
        """Return the next request."""

    def answered(self, turn: Turn, now: float) -> None:  # noqa: B027
        """Record that a request has been answered."""


class OpenLoad(Load):
    """Requests that arrive regardless of answers, in order."""

    def __init__(self, turns: Iterator[Turn]):
        self.turns = turns
        self.next_turn = next(turns, None)

    def next_at(self) -> float:
        return self.next_turn.arrival if self.next_turn else math.inf

    def pop(self) -> Turn:
        turn = self.next_turn
        assert turn
        self.next_turn = next(self.turns, None)
        return turn


class Conversations(Load):
    """Conversations of several turns: each repeats the conversation so far and adds a new question.

    They begin at `starts`, or in a closed load each user begins another one when the last has ended.
    """

    depends_on_answers = True

    def __init__(self, plan: "LoadPlan", starts: Iterator[float] | None, rng: random.Random):
        self.plan, self.starts, self.rng = plan, starts, rng
        self.heap: list[Turn] = []
        self.ids = FIRST_OWN_ID
        self.left = plan.requests
        if starts is None:
            assert plan.users
            for user in range(plan.users):
                self.push(self.first_turn(self.think(), user))
        else:
            self.start_next()

    def next_id(self) -> int:
        self.ids += 1
        return self.ids

    def think(self) -> float:
        return self.rng.expovariate(1 / self.plan.think_s) if self.plan.think_s else 0.0

    def push(self, turn: Turn) -> None:
        if self.left > 0:
            self.left -= 1
            heapq.heappush(self.heap, turn)

    def start_next(self) -> None:
        if self.starts is not None and (at := next(self.starts, None)) is not None:
            self.push(self.first_turn(at, -1))

    def first_turn(self, at: float, user: int) -> Turn:
        prompt, answer_len = self.plan.draw_lengths(self.rng)
        spans = (*self.plan.system_spans, (self.next_id(), prompt))
        return Turn(at, spans, answer_len, self.next_id(), user)

    def next_at(self) -> float:
        return self.heap[0].arrival if self.heap else math.inf

    def pop(self) -> Turn:
        turn = heapq.heappop(self.heap)
        if turn.number == 1 and self.starts is not None:
            self.start_next()
        return turn

    def answered(self, turn: Turn, now: float) -> None:
        at = now + self.think()
        if turn.number < self.plan.turns:
            prompt, answer_len = self.plan.draw_lengths(self.rng)
            spans = (*turn.prompt, (turn.answer_id, turn.answer_len), (self.next_id(), prompt))
            if sum(length for _, length in spans) + answer_len <= self.plan.max_len:
                self.push(Turn(at, spans, answer_len, self.next_id(), turn.user, turn.number + 1))
                return
        if self.starts is None:
            self.push(self.first_turn(at, turn.user))


@dataclass(frozen=True)
class LoadPlan:
    """A load that can be run again, and at other rates. Raises UsageError if it would not begin."""

    rate: float | None = None  # requests, or with several turns conversations, per second
    burstiness: float = 1.0  # squared coefficient of variation of the gaps between arrivals; 1: Poisson
    users: int | None = None  # of a closed load
    think_s: float = 0.0  # mean, exponential
    turns: int = 1  # of a conversation
    requests: int = 1000
    prompt: Lengths = field(default_factory=lambda: Lengths(512, 0.8))  # of each turn's question
    output: Lengths = field(default_factory=lambda: Lengths(128, 0.6))
    system: int = 0  # tokens of the system prompt that all conversations share
    trace: tuple[Turn, ...] = ()
    speed: float = 1.0  # of a trace
    seed: int = 0
    max_len: int = MAX_TOKENS  # of prompt and answer; a conversation ends before it would be longer

    def __post_init__(self) -> None:
        if sum((self.rate is not None, self.users is not None, bool(self.trace))) != 1:
            raise UsageError("the load is ambiguous", "give one of --rate, --users and --trace")
        checks = (
            ("--rate", self.rate, 0.0, math.inf),
            ("--burstiness", self.burstiness, 0.0, 1e6),
            ("--users", self.users, 0.0, 1e6),
            ("--turns", self.turns, 0.0, 1e6),
            ("--requests", self.requests, 0.0, 1e9),
            ("--speed", self.speed, 0.0, 1e9),
        )
        for flag, value, low, high in checks:
            if value is not None and not low < value < high:
                raise UsageError(f"{flag} is {value:g}", "give a number above 0")
        if not (0 <= self.think_s < math.inf) or self.system < 0:
            raise UsageError("--think and --system cannot be negative", "give 0 or more")

    @property
    def system_spans(self) -> tuple[tuple[int, int], ...]:
        return ((SYSTEM_PROMPT_ID, self.system),) if self.system else ()

    @property
    def shares_prefixes(self) -> bool:
        """Whether any two prompts begin alike."""
        if self.trace:
            firsts = [turn.prompt[0][0] for turn in self.trace]
            return len(set(firsts)) < len(firsts)
        return self.system > 0 or self.turns > 1

    @property
    def amount(self) -> float:
        """The quantity that is scaled to find the capacity: requests per second, users, or the speed of a
        trace."""
        return self.rate or self.users or self.speed

    def scaled_to(self, amount: float) -> "LoadPlan":
        if self.users is not None:
            return replace(self, users=max(1, round(amount)))
        return replace(self, rate=amount) if self.rate is not None else replace(self, speed=amount)

    def describe(self, amount: float | None = None) -> str:
        amount = self.amount if amount is None else amount
        if self.users is not None:
            return f"{amount:.0f} user" + ("s" if round(amount) != 1 else "")
        text = f"{float(f'{amount:.3g}'):,g}"
        return f"{text} requests/s" if self.rate is not None else f"{text} times the trace's speed"

    def start(self) -> Load:
        """Return the requests of a run: the same ones at every rate, only closer."""
        rng = random.Random(self.seed)
        if self.trace:
            first = self.trace[0].arrival
            return OpenLoad(
                turn._replace(arrival=(turn.arrival - first) / self.speed) for turn in self.trace[: self.requests]
            )
        if self.users is not None:
            return Conversations(self, None, rng)
        if self.turns > 1:
            return Conversations(self, self.arrivals(), rng)
        return OpenLoad(self.single_turns(rng))

    def arrivals(self) -> Iterator[float]:
        """Yield arrival times endlessly: gaps have a gamma distribution, which is exponential without bursts."""
        rng, at, shape = random.Random(self.seed + 1), 0.0, 1 / self.burstiness
        assert self.rate
        while True:
            at += (
                rng.gammavariate(shape, 1 / shape) / self.rate
                if self.burstiness != 1
                else (rng.expovariate(1.0) / self.rate)
            )
            yield at

    def single_turns(self, rng: random.Random) -> Iterator[Turn]:
        system = self.system_spans
        for index, at in zip(range(self.requests), self.arrivals(), strict=False):
            own = FIRST_OWN_ID + 2 * index
            prompt, answer_len = self.draw_lengths(rng)
            yield Turn(at, (*system, (own, prompt)), answer_len, own + 1)

    def draw_lengths(self, rng: random.Random) -> tuple[int, int]:
        """Return the lengths of a question and its answer, which fit into the context with the system prompt."""
        prompt, answer_len = self.prompt.draw(rng), self.output.draw(rng)
        most = max(2, self.max_len - self.system)
        answer_len = min(answer_len, most - 1)
        return min(prompt, most - answer_len), answer_len
