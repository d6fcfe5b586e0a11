"""The beginnings of prompts in a prefix cache, by the names that a router has for them, and what has changed
since the last report to a router. Pure Python, like `blocks.py`.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_NAMES = 50_000

_changes = itertools.count(1)  # of all journals of this process, so that one cursor is enough for them


class PrefixChanges(NamedTuple):
    """Changes of a prefix cache since an earlier cursor."""

    cursor: int
    held: list[Hashable]
    evicted: list[Hashable]


@dataclass(eq=False, slots=True)
class HeldPrefix:
    """A beginning whose blocks are all cached."""

    parent: Hashable | None  # the beginning that is one piece shorter
    end: int  # blocks up to its end
    serials: ListLike[int]  # of the blocks of its last piece
    followers: dict[Hashable, None] = field(default_factory=dict[Hashable, None])


class PrefixJournal:
    """Follows the blocks of one prefix cache. May be read and written in different threads.

    A beginning is lost with any of its blocks, and with it all that continue it, as a prefix is found from its
    first block on. Where layers are recurrent, the saved states that a prefix also needs are not followed.
    """

    def __init__(self, max_names: int = MAX_NAMES):
        """max_names: beginnings to follow, the least recently used are dropped first"""
        self.max_names = max_names
        self.held: OrderedDict[Hashable, HeldPrefix] = OrderedDict()
        self.names_of: dict[int, list[Hashable]] = {}  # by serial of a block of their last piece
        self.changes: OrderedDict[Hashable, int] = OrderedDict()  # number of each name's last change
        self.lock = threading.Lock()

    def record(self, names: ListLike[Hashable], serials: ListLike[int], share: float = 1.0) -> None:
        """Record that a prompt is cached.

        names: of its beginnings, evenly spaced, the shortest first; serials: of its full blocks; share: of the
        prompt that the longest beginning covers. As a front counts characters and a cache tokens, the border of a
        beginning may be a block or two beside the true one.
        """
        blocks = int(len(serials) * share)
        with self.lock:
            parent, begin = None, 0
            for index, name in enumerate(names):
                held = self.held.get(name)
                if held is None:
                    end = max(begin, blocks * (index + 1) // len(names))
                    if not end:
                        continue  # it is shorter than a block
                    held = HeldPrefix(parent, end, serials[begin:end])
                    self.add(name, held)
                self.held.move_to_end(name)
                parent, begin = name, held.end
            self.trim()

    def hold(self, names: ListLike[Hashable]) -> None:
        """Record that names are held that depend on no block."""
        with self.lock:
            for name in names:
                self.held[name] = HeldPrefix(None, 0, ())
                self.held.move_to_end(name)
                self.note_change(name)
            self.trim()

    def trim(self) -> None:
        while len(self.held) > self.max_names:
            self.remove(next(iter(self.held)))

    def add(self, name: Hashable, held: HeldPrefix) -> None:
        self.held[name] = held
        for serial in held.serials:
            self.names_of.setdefault(serial, []).append(name)
        if held.parent is not None:
            self.held[held.parent].followers[name] = None
        self.note_change(name)

    def dropped(self, serial: int) -> None:
        """Record that a block is cached no more."""
        if serial in self.names_of:
            with self.lock:
                for name in self.names_of.get(serial, [])[:]:
                    self.remove(name)

    def remove(self, name: Hashable) -> None:
        """Remove a beginning and all that continue it."""
        names = [name]
        while names:
            if (held := self.held.pop(name := names.pop(), None)) is None:
                continue
            names += held.followers
            for serial in held.serials:
                if len(sharing := self.names_of[serial]) == 1:
                    del self.names_of[serial]
                else:
                    sharing.remove(name)
            if parent := self.held.get(held.parent):
                parent.followers.pop(name, None)
            self.note_change(name)

    def note_change(self, name: Hashable) -> None:
        self.changes[name] = next(_changes)
        self.changes.move_to_end(name)
        if len(self.changes) > 2 * self.max_names:
            self.changes.popitem(last=False)

    def clear(self) -> None:
        """Record that the cache is empty."""
        with self.lock:
            for name in list(self.held):
                self.remove(name)

    def since(self, cursor: int) -> PrefixChanges:
        """Return what has changed after a cursor, 0 for all that is held."""
        changed, newest = list[Hashable](), cursor
        with self.lock:
            for name, number in reversed(self.changes.items()):
                if number <= cursor:
                    break
                newest = max(newest, number)
                changed.append(name)
            changed.reverse()
            held = [name for name in changed if name in self.held]
            evicted = [name for name in changed if name not in self.held] if cursor else []
        return PrefixChanges(newest, held, evicted)
