"""Where a sequence's state lives: keys and values in blocks of a shared pool, counted, found again by their
content; and of recurrent layers one row, which holds what the tokens so far have left.

Pure Python over the numbers of blocks and rows: knows nothing of tensors, so that thousands of traces a second can
be tested.

Blocks can be cut anywhere, a row cannot: it holds the state at one length. So rows are saved on the way, and a
sequence that is rolled back lands at a length that has one; what lies between is pending again.
"""

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import NamedTuple

from localllm.runtime.places import ZEROS, OutOfBlocks, Places
from localllm.runtime.tiers import Run, Tiers, runs

__all__ = ["NO_COPIES", "BlockPool", "Copies", "OutOfBlocks", "SequenceState", "Snapshot"]


class Copies(NamedTuple):
    """What is to be done in this order before the next step; rows: (from, to)."""

    blocks: tuple[Run, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()


NO_COPIES = Copies()


class BlockPool(Tiers[tuple[int, ...]]):
    """The blocks, and the rows of models that have recurrent layers. Blocks that are evicted go aside, if there is
    an aside, and so a conversation that pauses leaves the device and is not computed again; rows do not.

    The key of a full block is its parent's serial and its tokens: exact, so no hash collision can show one user
    another's text. Serials are never reused; the key of a saved row is the serial of the block that ends there.
    """

    def __init__(self, blocks: int, block_size: int, rows: int = 0, aside: int = 0):
        super().__init__(blocks, aside)
        self.block_size = block_size
        self.rows = Places[int](rows)
        self.recurrent = rows > 0
        self.serial = 0
        self.evicted = 0  # blocks whose content gave way to others', so far
        self.serial_of: dict[tuple[int, ...], int] = {}  # of remembered blocks, by their keys

    def take(self, after: int | None = None) -> int:
        """The block behind `after` if it holds nothing, else the least recently used.

        Neighbours let attention read a sequence as one slice instead of gathering its blocks.
        """
        if after is not None and after + 1 in self.idle and after + 1 not in self.key_of:
            return self.take_idle(after + 1)
        return super().take()

    def remember(self, block: int, parent: int, tokens: ListLike[int]) -> int:
        """Let others find a full block; returns the serial that its successor names as parent."""
        key = (parent, *tokens)
        if key not in self.found:
            self.serial += 1
            self.serial_of[key] = self.serial
        self.name(block, key)
        return self.serial_of[key]

    def vacate(self, place: int) -> None:
        self.evicted += place in self.key_of
        super().vacate(place)

    def forget(self, place: int) -> None:
        key = self.key_of.get(place)
        super().forget(place)
        if key is not None and (serial := self.serial_of.pop(key)) in self.rows.found:
            self.rows.forget(self.rows.found[serial])

    def forget_all(self) -> None:
        super().forget_all()
        self.rows.forget_all()

    def longest_prefix(self, token_ids: ListLike[int]) -> tuple[list[int], list[int]]:
        """Blocks that already hold the beginning of these tokens, and their serials, as far as `bring` has room;
        with recurrent layers only as far as there is a saved row.

        The last token is never taken from the cache: it must be run to give logits.
        """
        blocks, serials, parent, end, room = [], [], 0, 0, self.available
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            key = (parent, *token_ids[start : start + self.block_size])
            block = self.found.get(key)
            if block is None:
                break
            room -= not self.users[block]
            if room < 0:
                break
            blocks.append(block)
            serials.append(parent := self.serial_of[key])
            if not self.recurrent or parent in self.rows.found:
                end = len(blocks)
        return blocks[:end], serials[:end]

    def drain_copies(self) -> Copies:
        """What to do now; nothing is left to do after that."""
        return Copies(runs(self.drain()), self.rows.drain())

    def check(self) -> None:
        super().check()
        self.rows.check()
        assert self.serial_of.keys() == self.found.keys()
        assert set(self.rows.found) <= set(self.serial_of.values())

    def check_idle(self) -> None:
        """Nothing is in use any more."""
        self.check()
        assert self.available == self.count
        assert self.rows.available == self.rows.count


class Save(NamedTuple):
    """A row that holds the recurrent state at `length`, once the step that computes that far has run."""

    length: int
    row: int
    rolling: bool  # replaces the sequence's last rolling one


class SequenceState:
    """One sequence's blocks and row, with the verbs that prefix sharing, speculation, undo and branching are made
    of: extend, rollback, snapshot, fork, free.

    What somebody else uses or may find is never written to: extending into it copies it first.
    """

    def __init__(self, pool: BlockPool, token_ids: ListLike[int] = ()):
        """Starts with the longest prefix of `token_ids` that the pool remembers."""
        self.pool = pool
        shared, self.serials = pool.longest_prefix(token_ids)
        self.table = pool.bring(shared)
        self.length = len(self.table) * pool.block_size
        self.row: int | None = None  # with the recurrent state at `length`; None: there is none, or it is zero
        self.saves: list[Save] = []  # not remembered yet
        self.rolling = 0  # serial of the last rolling save that was remembered
        if pool.recurrent and self.serials:
            self.row = pool.rows.share(pool.rows.found[self.serials[-1]])

    @property
    def missing_rows(self) -> int:
        """How many rows it takes to extend."""
        rows = self.pool.rows
        return int(self.pool.recurrent and (self.row is None or rows.users[self.row] > 1))

    def extend(self, count: int) -> None:
        """Make room for `count` more tokens. Raises OutOfBlocks, having changed nothing that others see."""
        size, pool = self.pool.block_size, self.pool
        if count and self.length % size:
            # Before writing behind `length`: a block that is shared or remembered is copied, not written to.
            index = self.length // size
            self.table[index] = pool.own(self.table[index])
        while len(self.table) * size < self.length + count:
            self.table.append(pool.take(self.table[-1] if self.table else None))
        if count and pool.recurrent:
            self.own_row()
        self.length += count

    def own_row(self) -> None:
        rows = self.pool.rows
        if self.row is not None:
            self.row = rows.own(self.row)
        else:
            self.row = rows.take()
            rows.copies.append((ZEROS, self.row))

    def save(self, length: int, rolling: bool = False) -> None:
        """Have the recurrent state at `length` saved by the step that is about to run, for rollback and for others
        with this beginning. Where every row is in use it is not saved."""
        if self.pool.rows.available:
            self.saves.append(Save(length, self.pool.rows.take(), rolling))

    def save_steps(self, count: int, prompt_length: int, guessed: Iterable[int]) -> None:
        """Have the recurrent state saved at the last block boundary among the last `count` tokens, and at each of
        `guessed`, the lengths behind which tokens may turn out to be wrong. Of an answer only the newest boundary
        is kept: what comes next continues it, or begins anew at the prompt."""
        if not self.pool.recurrent:
            return
        boundary = self.length - self.length % self.pool.block_size
        if boundary > self.length - count:
            self.save(boundary, rolling=boundary > prompt_length)
        for length in guessed:
            if length != boundary:
                self.save(length)

    def rollback(self, length: int) -> None:
        """Forget the tokens from `length` on; with recurrent layers those from the last saved length before it."""
        assert 0 <= length <= self.length
        if self.pool.recurrent and (length < self.length or not length):
            length = self.restore(length)
        size = self.pool.block_size
        keep = -(-length // size)
        # In order, so that they are reused as neighbours; an evicted text loses its beginning first.
        for block in self.table[keep:]:
            self.pool.release(block)
        del self.table[keep:]
        del self.serials[length // size :]
        self.length = length

    def restore(self, length: int) -> int:
        """Use the newest saved row up to `length`; returns its length, or 0 without a row."""
        pool, size = self.pool, self.pool.block_size
        saved = [(save.length, save.row) for save in self.saves]
        saved += [((i + 1) * size, pool.rows.found[s]) for i, s in enumerate(self.serials) if s in pool.rows.found]
        length, row = max((s for s in saved if s[0] <= length), default=(0, None))
        old, self.row = self.row, None if row is None else pool.rows.share(row)
        if old is not None:
            pool.rows.release(old)
        for save in self.saves:
            if save.length > length:
                pool.rows.release(save.row)
        self.saves = [save for save in self.saves if save.length <= length]
        return length

    def remember(self, token_ids: ListLike[int]) -> None:
        """Let others find this sequence's full blocks. `token_ids`: all its tokens, from the first."""
        size, known = self.pool.block_size, min(self.length, len(token_ids))
        for index in range(len(self.serials), known // size):
            parent = self.serials[-1] if self.serials else 0
            tokens = token_ids[index * size : (index + 1) * size]
            self.serials.append(self.pool.remember(self.table[index], parent, tokens))
        for save in self.saves:
            if save.length <= known:
                self.hand_over(save)
        self.saves = [save for save in self.saves if save.length > known]

    @property
    def saves_at_end(self) -> list[tuple[int, int]]:
        """The rows to copy once all tokens are computed: from the state's own to each that is to hold the same."""
        return [(self.row, save.row) for save in self.saves if self.row is not None and save.length == self.length]

    def hand_over(self, save: Save) -> None:
        """A saved row now belongs to the prefix index, where it may be evicted. One inside a block is let go."""
        rows, size = self.pool.rows, self.pool.block_size
        if save.length % size == 0:
            serial = self.serials[save.length // size - 1]
            if save.rolling:
                if self.rolling in rows.found and self.rolling != serial:
                    rows.forget(rows.found[self.rolling])
                self.rolling = serial
            rows.name(save.row, serial)
        rows.release(save.row)

    def fork(self) -> "SequenceState":
        """A second sequence that shares all tokens so far."""
        twin = SequenceState(self.pool)
        used = -(-self.length // self.pool.block_size)  # not what a failed extend has left behind
        twin.table = [self.pool.share(block) for block in self.table[:used]]
        twin.serials = list(self.serials)
        twin.length = self.length
        twin.row = None if self.row is None else self.pool.rows.share(self.row)
        for save in self.saves:
            self.pool.rows.share(save.row)
        twin.saves = list(self.saves)
        return twin

    def snapshot(self) -> "Snapshot":
        """Something to come back to, whatever becomes of this sequence."""
        return Snapshot(self.fork())

    def free(self) -> None:
        self.rollback(0)


class Snapshot:
    """A sequence as it was: `fork()` continues from there, any number of times; `free()` lets it go."""

    def __init__(self, frozen: SequenceState):
        self.frozen = frozen
        self.length = frozen.length

    def fork(self) -> SequenceState:
        return self.frozen.fork()

    def free(self) -> None:
        self.frozen.free()
