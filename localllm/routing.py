"""Which replica a request is sent to: the policies that a front of replicas and `localllm simulate` share.

A router has the knowledge of a front: which requests it sent where, how many of them have not ended, and the
reports of replicas about their prefix caches. It is plain data and reads no clock, so that a simulation takes the
same decisions.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from localllm.errors import UsageError

MAX_REPLICAS = 256
ROUTES = ("round-robin", "load", "prefix")
MAX_NAMES = 100_000  # beginnings of prompts that are remembered
MAX_OWNERS = 8  # replicas that are remembered for each of them
REPORT_S = 2.0  # between reports of what prefix caches hold
MAX_AHEAD = 8  # requests that a replica with the whole prompt may have more than the least loaded one

R = TypeVar("R", bound=Hashable)


class Router(Generic[R]):
    """Chooses a replica for each request.

    round-robin: the one that was chosen longest ago. load: the one with the fewest requests. prefix: the one that
    was sent the longest known beginning of the prompt, by this router or another, unless it has too many requests
    more than the least loaded one: MAX_AHEAD times the share of the prompt that it has in its cache. So a short
    common beginning, such as a system prompt, attracts less than a conversation, and one that most requests share
    spreads over all replicas.

    A replica that has evicted a beginning gets it again if it is not busier than others. If it went elsewhere, it
    would evict what others need: conversations that stay where they are leave the caches of other replicas alone.
    """

    def __init__(self, route: str, max_names: int = MAX_NAMES):
        """route: one of ROUTES; max_names: beginnings of prompts to remember, the least recently used are
        forgotten first."""
        assert route in ROUTES
        self.route = route
        self.max_names = max_names
        self.owners: OrderedDict[Hashable, tuple[R, ...]] = OrderedDict()  # of each beginning, newest first
        self.evicted: OrderedDict[tuple[Hashable, R], None] = OrderedDict()  # beginnings that their owners lack
        self.turn = 0
        self.chosen_at: dict[R, int] = {}  # turn in which each replica was chosen last

    def rank(self, names: Sequence[Hashable], loads: Mapping[R, int], *, is_bound: bool = False) -> list[R]:
        """All replicas, the best for a request first.

        names: of the beginnings of its prompt, the shortest first, each including the one before; loads: requests
        of each replica that have not ended; is_bound: the request needs the replica that owns its last name,
        whatever the loads and the route.
        """
        if is_bound or self.route == "prefix":
            for known in range(len(names), 0, -1):
                if owners := [owner for owner in self.owners.get(names[known - 1], ()) if owner in loads]:
                    best = min(owners, key=lambda owner: self.load_key(owner, loads))
                    while known and (names[known - 1], best) in self.evicted:
                        known -= 1
                    ahead = math.inf if is_bound else max(1, math.ceil(MAX_AHEAD * known / len(names)))
                    if loads[best] <= min(loads.values()) + ahead:
                        return [best, *(each for each in self.by_load(loads) if each != best)]
                    break
        return self.by_load(loads)

    def by_load(self, loads: Mapping[R, int]) -> list[R]:
        return sorted(loads, key=lambda replica: self.load_key(replica, loads))

    def load_key(self, replica: R, loads: Mapping[R, int]) -> tuple[int, int]:
        load = 0 if self.route == "round-robin" else loads[replica]
        return load, self.chosen_at.get(replica, 0)

    def sent(self, names: Iterable[Hashable], replica: R) -> None:
        """Record that a request was sent to a replica."""
        self.turn += 1
        self.chosen_at[replica] = self.turn
        self.add_owner(names, replica)

    def learn(self, replica: R, held: Iterable[Hashable], evicted: Iterable[Hashable]) -> None:
        """Record the report of a replica: beginnings that its cache holds, also of requests that other routers
        sent there, and those that it has evicted."""
        self.add_owner(held, replica)
        for name in evicted:
            if replica in self.owners.get(name, ()):
                self.evicted[name, replica] = None
        while len(self.evicted) > self.max_names:
            self.evicted.popitem(last=False)

    def add_owner(self, names: Iterable[Hashable], replica: R) -> None:
        for name in names:
            owners = self.owners.get(name, ())
            if owners[:1] != (replica,):
                kept = (owner for owner in owners if owner != replica)
                self.owners[name] = (replica, *kept)[:MAX_OWNERS]
            self.owners.move_to_end(name)
            self.evicted.pop((name, replica), None)
        while len(self.owners) > self.max_names:
            self.owners.popitem(last=False)

    def forget(self, replica: R) -> None:
        """Forget the requests sent to a replica, because it has ended."""
        self.chosen_at.pop(replica, None)
        for name, owners in list(self.owners.items()):
            if replica in owners:
                self.owners[name] = tuple(owner for owner in owners if owner != replica)
        for pair in [pair for pair in self.evicted if pair[1] == replica]:
            del self.evicted[pair]


def parse_replicas(text: str) -> tuple[int, int]:
    """Parse `4` or `1..8`: the replicas at the start and at most. Raises UsageError."""
    low, dots, high = text.partition("..")
    if low.isdecimal() and (high.isdecimal() or not dots):
        first, most = int(low), int(high or low)
        if 1 <= first <= most <= MAX_REPLICAS:
            return first, most
    raise UsageError(f"--replicas is {text!r}", f"give 1 to {MAX_REPLICAS}, or a range such as 1..8")
