"""Sequences of a simulation: lengths and identities of their tokens, without the tokens themselves; and those that
decode, as a group.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import cast

from localllm.metrics import Stopwatch
from localllm.request import NO_NAMES, PrefixNames, Request, SamplingParams
from localllm.runtime.kv_cache.sequence_state import BlockPool
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
        """number: order of arrival; prompt: spans, as in `TokenSpans`; max_len: most tokens of prompt and
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


class DecodeGroup:
    """Sequences that decode, advanced together: each step costs the same however many they are.

    All members bring one token in every step. What changes for each of them follows from the number of steps since
    it joined, and is computed when it leaves. Only what other sequences depend on happens in its step: blocks are
    allocated when a member needs one, and members whose answers are complete leave.
    """

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.members: dict[int, SimulatedSequence] = {}  # by number
        self.launched = self.committed = 0  # steps of the engine so far
        self.context = 0  # cached tokens of all members
        self.missing_blocks = 0  # that members lack for their reserved answers, except for those in `growing`
        self.growing: dict[int, SimulatedSequence] = {}  # members whose reservation still grows
        self.needs_block: dict[int, list[SimulatedSequence]] = {}  # by step; may contain some that have left
        self.last_steps: list[tuple[int, int]] = []  # heap of step and number
        self.numbers: list[int] = []  # heap; may contain some that have left
        self.joined_in: Counter[int] = (
            Counter()
        )  # members by the step after which they joined, of the newest steps

    # Membership

    def join(self, sequence: SimulatedSequence, reserved_blocks: int | None) -> None:
        """Add a sequence that is sampled in the step that is being launched.

        reserved_blocks: of its known tokens and reserved answer; None if they depend on its length
        """
        number, step, size = sequence.request.id, self.launched, self.pool.block_size
        table, length = self.table_of(sequence), sequence.computed
        self.members[number] = sequence
        heappush(self.numbers, number)
        self.joined_in[step] += 1
        sequence.joined_at, sequence.reserved_blocks = step, reserved_blocks
        self.context += length
        if reserved_blocks is None:
            self.growing[number] = sequence
        else:
            self.missing_blocks += reserved_blocks - len(table)
        self.needs_block.setdefault(step + len(table) * size - length + 1, []).append(sequence)
        # Tokens of earlier steps that have not been read are `unread_count`, and this step brings another one.
        last_step = step + sequence.answer_len - (sequence.produced + sequence.unread_count + 1)
        if last_step > step:  # otherwise it is among the sequences that the step samples one by one
            heappush(self.last_steps, (last_step, number))

    def leave(self, sequence: SimulatedSequence, last_read_at: float) -> None:
        """Remove a member, and bring it up to date. last_read_at: when the newest token of the members was read"""
        number, state = sequence.request.id, sequence.state
        assert state
        del self.members[number]
        if sequence.joined_at in self.joined_in:
            self.joined_in[sequence.joined_at] -= 1
        if self.growing.pop(number, None) is None:
            assert sequence.reserved_blocks is not None
            self.missing_blocks -= sequence.reserved_blocks - len(state.block_table)
        state.length = self.length_of(sequence)
        self.context -= state.length
        if (read := self.committed - sequence.joined_at) > 0:
            sequence.produced += read
            sequence.prompt_spans.length += read
            sequence.last_token_at = last_read_at
        sequence.unread_count = self.launched - self.committed
        sequence.joined_at = -1

    def clear(self) -> None:
        """Forget everything about members, of which there are none any more."""
        assert not self.members and not self.missing_blocks and not self.context
        self.needs_block.clear()
        self.last_steps.clear()
        self.numbers.clear()
        self.joined_in.clear()

    @staticmethod
    def table_of(sequence: SimulatedSequence) -> list[int]:
        assert sequence.state
        return sequence.state.block_table

    def length_of(self, sequence: SimulatedSequence) -> int:
        """Return the cached tokens of a member."""
        assert sequence.state
        return sequence.state.length + self.launched - sequence.joined_at

    @property
    def first_number(self) -> int:
        """The lowest number of a member."""
        while self.numbers[0] not in self.members:
            heappop(self.numbers)
        return self.numbers[0]

    # Steps

    @property
    def blocks_of_next_step(self) -> int:
        """Blocks that the members need in the next step, or a few more."""
        return len(self.needs_block.get(self.launched + 1, ()))

    def extend(self) -> None:
        """Give each member a slot for the token of the next step."""
        self.launched += 1
        self.context += len(self.members)
        if self.launched in self.needs_block:
            self.allocate_blocks()

    def allocate_blocks(self) -> None:
        due = [sequence for sequence in self.needs_block.pop(self.launched) if sequence.joined_at >= 0]
        due.sort(key=lambda sequence: sequence.request.id)
        allocate = self.pool.allocate
        for sequence in due:
            table = self.table_of(sequence)
            table.append(allocate(table[-1]))
            if sequence.reserved_blocks is not None:
                self.missing_blocks -= 1
        self.needs_block.setdefault(self.launched + self.pool.block_size, []).extend(due)

    def cache_filled_blocks(self) -> None:
        """Add blocks to the prefix cache as soon as their last tokens are known.

        Only a disk needs them before their sequence leaves: it writes them along with the blocks before them.
        """
        due = [s for s in self.needs_block.get(self.launched + 1, ()) if 0 <= s.joined_at <= self.committed]
        for sequence in sorted(due, key=lambda sequence: sequence.request.id):
            assert sequence.state
            sequence.state.cache_blocks(sequence.token_ids, len(sequence.state.block_table))

    @property
    def next_end(self) -> int | None:
        """The step with whose token the next answer is complete."""
        return self.last_steps[0][0] if self.last_steps else None

    def commit(self) -> int:
        """Read the tokens of a step, and return how many are of members that joined before it."""
        self.committed += 1
        if not self.joined_in:
            return len(self.members)
        for step in [step for step in self.joined_in if step < self.committed]:
            del self.joined_in[step]
        return len(self.members) - sum(self.joined_in.values())

    def take_finished(self) -> list[SimulatedSequence]:
        """Return the members whose answers are complete with the step that has been read, in order of arrival."""
        finished: list[SimulatedSequence] = []
        while self.last_steps and self.last_steps[0][0] <= self.committed:
            finished.append(self.members[heappop(self.last_steps)[1]])
        return finished
