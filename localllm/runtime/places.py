"""Numbered places of a cache (blocks, rows): in use and counted, or idle and kept for what they hold until the
space is needed. Pure Python: knows nothing of tensors, nor of what a place is.

Copies that somebody needs before a place may be written to are listed; whoever owns the tensors carries them out,
in their order, before the next step. So a place may be given away while a copy from it is still to be done.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


ZEROS = -1  # as the source of a copy


class OutOfBlocks(Exception):
    """Every block, or every row, is in use."""


class Places(Generic[Key]):
    def __init__(self, count: int):
        self.count = count
        self.users = [0] * count
        self.key_of: dict[int, Key] = {}  # place -> what it holds
        self.found: dict[Key, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # next to be reused first
        self.copies: list[tuple[int, int]] = []  # (from, to)

    @property
    def available(self) -> int:
        """How many can be taken now."""
        return len(self.idle)

    def take(self) -> int:
        """One to write to: the least recently used. Raises OutOfBlocks."""
        if not self.idle:
            raise OutOfBlocks
        return self.take_idle(next(iter(self.idle)))

    def take_idle(self, place: int) -> int:
        self.vacate(place)
        del self.idle[place]
        self.users[place] = 1
        return place

    def share(self, place: int) -> int:
        self.idle.pop(place, None)
        self.users[place] += 1
        return place

    def release(self, place: int) -> None:
        self.users[place] -= 1
        if self.users[place] == 0:
            self.idle[place] = None
            self.idle.move_to_end(place, last=place in self.key_of)  # without content: reuse it first

    def own(self, place: int) -> int:
        """A place with the same content that may be written to: itself, or a copy where somebody else uses it or
        may find it. Raises OutOfBlocks."""
        if self.users[place] == 1 and place not in self.key_of:
            return place
        if self.users[place] == 1 and not self.idle:
            self.vacate(place)
            return place
        copy = self.take()
        self.copies.append((place, copy))
        self.release(place)
        return copy

    def name(self, place: int, key: Key) -> None:
        """Let others find its content by `key`, unless they find the same elsewhere."""
        if key not in self.found:
            self.key_of[place], self.found[key] = key, place

    def vacate(self, place: int) -> None:
        """It is about to be written to: what it holds cannot be found there any more."""
        self.forget(place)

    def forget(self, place: int) -> None:
        key = self.key_of.pop(place, None)
        if key is not None:
            del self.found[key]
            if place in self.idle:
                self.idle.move_to_end(place, last=False)

    def forget_all(self) -> None:
        """As after a step that broke off: nobody knows what was copied and computed."""
        for place in list(self.key_of):
            self.forget(place)
        self.copies.clear()

    def drain(self) -> tuple[tuple[int, int], ...]:
        """The copies to do now; the list is empty after that."""
        copies, self.copies = tuple(self.copies), []
        return copies

    def check(self) -> None:
        """Every place is in use or idle, and what is named can be found: for tests and when idle."""
        assert all((self.users[place] == 0) == (place in self.idle) for place in range(self.count))
        assert all(self.found[key] == place for place, key in self.key_of.items())
        assert len(self.key_of) == len(self.found)
