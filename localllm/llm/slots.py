"""Numbered slots, as in llama.cpp's server: each remembers the tokens of its last request, whose
keys and values are in the prefix cache. They reserve no memory, and any number of requests runs at once; idle
slots from MAX_SLOTS on are forgotten.
"""

import heapq
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from localllm.request import MAX_SLOTS, Request


@dataclass
class RequestSlot:
    number: int
    request_id: int  # of the last request
    token_ids: ListLike[int]  # of its prompt and answer so far
    running: int = 0  # requests of this slot that have not ended


class SlotTable:
    """The slots of each client. Written on the engine's thread; other threads may read at any time."""

    def __init__(self) -> None:
        self.slots: dict[str, dict[int, RequestSlot]] = {}
        self.numbers: dict[int, int] = {}  # slots of requests that have not ended
        self.idle: dict[str, list[int]] = {}  # heaps of numbers that were free once
        self.next_number: dict[str, int] = {}  # at which slots that no request has had begin

    def begin(self, request: Request, token_ids: ListLike[int]) -> None:
        """Let a request have its slot: the one that it names, otherwise the lowest idle one. token_ids: of its
        prompt and its answer, which grows"""
        number = self.lowest_idle(request.client) if request.slot is None else request.slot
        running = slot.running if (slot := self.find(request.client, number)) else 0
        self.put(request.client, RequestSlot(number, request.id, token_ids, running + 1))
        self.numbers[request.id] = number

    def end(self, request: Request) -> None:
        """Free the slot of a request that has ended, and remember its tokens."""
        client, number = request.client, self.numbers.pop(request.id, None)
        if number is None or not (slot := self.find(client, number)):
            return
        slot.running -= 1
        if not slot.running:
            heapq.heappush(self.idle.setdefault(client, []), number)
            if number >= MAX_SLOTS:
                del self.slots[client][number]

    def put(self, client: str, slot: RequestSlot) -> None:
        self.slots.setdefault(client, {})[slot.number] = slot

    def number_of(self, request: Request) -> int:
        """Return the slot of a request that has started, -1 if a later one has it."""
        slots = list(self.slots.get(request.client, {}).values())
        return next((slot.number for slot in slots if slot.request_id == request.id), -1)

    def remember(self, client: str, number: int | None, token_ids: ListLike[int]) -> int:
        """Let a slot have other tokens, the lowest idle one if `number` is None. Returns its number."""
        if number is None:
            number = self.lowest_idle(client)
            heapq.heappush(self.idle.setdefault(client, []), number)
        running = slot.running if (slot := self.find(client, number)) else 0
        self.put(client, RequestSlot(number, 0, token_ids, running))
        return number

    def find(self, client: str, number: int) -> RequestSlot | None:
        return self.slots.get(client, {}).get(number)

    def erase(self, client: str, number: int) -> ListLike[int]:
        """Forget the tokens of a slot, and return them."""
        slot = self.find(client, number)
        if slot is None:
            return ()
        if not slot.running:
            heapq.heappush(self.idle.setdefault(client, []), number)
            del self.slots[client][number]
        return slot.token_ids

    def of_client(self, client: str) -> list[RequestSlot]:
        """Return a client's slots by number, at least number 0."""
        slots = sorted(list(self.slots.get(client, {}).values()), key=lambda slot: slot.number)
        return slots or [RequestSlot(0, 0, ())]

    def lowest_idle(self, client: str) -> int:
        heap = self.idle.get(client, [])
        while heap:
            number = heapq.heappop(heap)
            if not ((slot := self.find(client, number)) and slot.running):
                return number
        number = self.next_number.get(client, 0)
        while self.find(client, number):
            number += 1
        self.next_number[client] = number + 1
        return number
