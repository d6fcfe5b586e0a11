"""Where a sequence's keys and values live: blocks of a shared pool, counted, found again by their content.

Pure Python over block numbers: knows nothing of tensors, so that thousands of traces a second can be tested.
The pool lists copies that a sequence needs before it may write; whoever owns the tensors carries them out.
"""

from collections import OrderedDict
from collections.abc import Sequence as ListLike


class OutOfBlocks(Exception):
    """Every block of the pool is in use."""


class BlockPool:
    """Blocks are in use (counted) or idle: kept for their content until the space is needed."""

    def __init__(self, blocks: int, block_size: int):
        self.block_size = block_size
        self.users = [0] * blocks
        self.key_of: dict[int, tuple[int, ...]] = {}  # block -> what it holds
        # The key of a full block is its parent's serial and its tokens: exact, so no hash collision can show
        # one user another's text. Serials are never reused.
        self.found: dict[tuple[int, ...], tuple[int, int]] = {}  # key -> (block, own serial)
        self.serial = 0
        self.idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # next to be reused first
        self.copies: list[tuple[int, int]] = []  # (from, to), to be done in this order before the next step

    @property
    def available(self) -> int:
        """How many blocks can be taken now."""
        return len(self.idle)

    def take(self, after: int | None = None) -> int:
        """A block to write to: the one behind `after` if it holds nothing, else the least recently used.

        Neighbours let attention read a sequence as one slice instead of gathering its blocks.
        """
        if not self.idle:
            raise OutOfBlocks
        block = next(iter(self.idle))
        if after is not None and after + 1 in self.idle and after + 1 not in self.key_of:
            block = after + 1
        del self.idle[block]
        self.forget(block)
        self.users[block] = 1
        return block

    def share(self, block: int) -> int:
        self.idle.pop(block, None)
        self.users[block] += 1
        return block

    def release(self, block: int) -> None:
        self.users[block] -= 1
        if self.users[block] == 0:
            self.idle[block] = None
            self.idle.move_to_end(block, last=block in self.key_of)  # without content: reuse it first

    def remember(self, block: int, parent: int, tokens: ListLike[int]) -> int:
        """Let others find a full block; returns the serial that its successor names as parent."""
        key = (parent, *tokens)
        if key not in self.found:
            self.serial += 1
            self.key_of[block], self.found[key] = key, (block, self.serial)
        return self.found[key][1]

    def forget(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.found[key]

    def longest_prefix(self, token_ids: ListLike[int]) -> tuple[list[int], list[int]]:
        """Blocks that already hold the beginning of these tokens, and their serials.

        The last token is never taken from the cache: it must be run to give logits.
        """
        blocks, serials, parent = [], [], 0
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            hit = self.found.get((parent, *token_ids[start : start + self.block_size]))
            if hit is None:
                break
            blocks.append(hit[0])
            serials.append(hit[1])
            parent = hit[1]
        return blocks, serials

    def drain_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies to do now; the list is empty after that."""
        copies, self.copies = tuple(self.copies), []
        return copies

    def check(self) -> None:
        """Every block is in use or idle, and what is remembered can be found: for tests and when idle."""
        assert all((users == 0) == (block in self.idle) for block, users in enumerate(self.users))
        assert all(self.found[key][0] == block for block, key in self.key_of.items())
        assert len(self.key_of) == len(self.found)


class SequenceState:
    """One sequence's blocks, with the verbs that prefix sharing, speculation, undo and branching are made of:
    extend, rollback, snapshot, fork, free.

    A block that somebody else uses or may find is never written to: extending into it copies it first.
    """

    def __init__(self, pool: BlockPool, token_ids: ListLike[int] = ()):
        """Starts with the longest prefix of `token_ids` that the pool remembers."""
        self.pool = pool
        shared, self.serials = pool.longest_prefix(token_ids)
        self.table = [pool.share(block) for block in shared]
        self.length = len(self.table) * pool.block_size

    def extend(self, count: int) -> None:
        """Make room for `count` more tokens. Raises OutOfBlocks, having changed nothing that others see."""
        size = self.pool.block_size
        if count and self.length % size:
            self.own_last_block()
        while len(self.table) * size < self.length + count:
            self.table.append(self.pool.take(self.table[-1] if self.table else None))
        self.length += count

    def own_last_block(self) -> None:
        """Before writing behind `length`: a block that is shared or remembered is copied, not written to."""
        pool, index = self.pool, self.length // self.pool.block_size
        last = self.table[index]
        if pool.users[last] == 1 and last not in pool.key_of:
            return
        if pool.users[last] == 1 and not pool.available:
            pool.forget(last)
            return
        copy = pool.take()
        pool.copies.append((last, copy))
        pool.release(last)
        self.table[index] = copy

    def rollback(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        assert 0 <= length <= self.length
        size = self.pool.block_size
        keep = -(-length // size)
        # In order, so that they are reused as neighbours; an evicted text loses its beginning first.
        for block in self.table[keep:]:
            self.pool.release(block)
        del self.table[keep:]
        del self.serials[length // size :]
        self.length = length

    def remember(self, token_ids: ListLike[int]) -> None:
        """Let others find this sequence's full blocks. `token_ids`: all its tokens, from the first."""
        size = self.pool.block_size
        for index in range(len(self.serials), min(self.length, len(token_ids)) // size):
            parent = self.serials[-1] if self.serials else 0
            tokens = token_ids[index * size : (index + 1) * size]
            self.serials.append(self.pool.remember(self.table[index], parent, tokens))

    def fork(self) -> "SequenceState":
        """A second sequence that shares all tokens so far."""
        twin = SequenceState(self.pool)
        used = -(-self.length // self.pool.block_size)  # not what a failed extend has left behind
        twin.table = [self.pool.share(block) for block in self.table[:used]]
        twin.serials = list(self.serials)
        twin.length = self.length
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
