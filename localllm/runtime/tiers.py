"""Places in two tiers: on the device, where they are used, and aside in the host's memory, where goes what the
device has no room for and somebody may ask for again. Pure Python, as `places.py`.

Places from `count` on are aside. Nobody uses one: what it holds comes back to the device first. A content lies in
one tier at a time, so a copy between them moves it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import NamedTuple

from localllm.runtime.places import Key, Places

LOOK_BACK = 2  # runs: putting aside and bringing back take turns


class Tiers(Places[Key]):
    def __init__(self, count: int, aside: int = 0):
        super().__init__(count)
        self.users += [0] * aside
        self.aside = OrderedDict[int, None].fromkeys(range(count, count + aside))  # next to be reused first

    def vacate(self, place: int) -> None:
        if not self.aside or place not in self.key_of:
            self.forget(place)
            return
        there = next(iter(self.aside))
        self.forget(there)
        self.copies.append((place, there))
        self.move(place, there)

    def bring(self, places: ListLike[int]) -> list[int]:
        """Take part in contents, each by its place; where they lie on the device then. Of those that nobody uses
        there may be no more than `available`."""
        for place in places:
            if place < self.count:
                self.share(place)
            else:
                del self.aside[place]  # before room is made for another: it must not be what goes
        return [place if place < self.count else self.bring_back(place) for place in places]

    def bring_back(self, there: int) -> int:
        place = self.take()
        self.copies.append((there, place))
        self.aside[there] = None
        self.move(there, place)
        return place

    def name(self, place: int, key: Key) -> None:
        there = self.found.get(key)
        if there in self.aside:  # what was put aside has been computed again
            self.move(there, place)
        else:
            super().name(place, key)

    def move(self, place: int, there: int) -> None:
        """What is in one place is found in another from now on."""
        key = self.key_of.pop(place)
        self.key_of[there], self.found[key] = key, there
        if place in self.aside:
            self.aside.move_to_end(place, last=False)
        if there in self.aside:
            self.aside.move_to_end(there)

    def forget(self, place: int) -> None:
        super().forget(place)
        if place in self.aside:
            self.aside.move_to_end(place, last=False)

    def check(self) -> None:
        super().check()
        assert sorted(self.aside) == list(range(self.count, len(self.users)))
        assert not any(self.users[self.count :])


class Run(NamedTuple):
    """Neighbours that are copied to neighbours."""

    source: int
    target: int
    length: int

    def goes_on(self, source: int, target: int) -> bool:
        """Is this its next copy? What it reads and what it writes stay apart."""
        behind = (source, target) == (self.source + self.length, self.target + self.length)
        return behind and abs(source - target) > self.length

    def meets(self, source: int, target: int) -> bool:
        """Does it matter which of the two is done first?"""
        written = range(self.target, self.target + self.length)
        return source in written or target in written or target in range(self.source, self.source + self.length)


def runs(copies: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """As few as can be made of copies, (from, to), that are to be done in their order."""
    found: list[Run] = []
    for copy in copies:
        for back in range(len(found) - 1, max(-1, len(found) - 1 - LOOK_BACK), -1):
            if found[back].goes_on(*copy):
                found[back] = found[back]._replace(length=found[back].length + 1)
                break
            if found[back].meets(*copy):
                found.append(Run(*copy, 1))
                break
        else:
            found.append(Run(*copy, 1))
    return tuple(found)
