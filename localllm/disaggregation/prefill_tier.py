"""The side that answers: to the engine's block pool, the processes that compute prompts are a tier below it.

A sequence whose prompt lacks many tokens waits until another process has computed them, like one whose prefix is
read from the disk, while the answers of other sequences continue. The keys and values of all full blocks become
part of the prefix cache; the rest of the prompt, 1 to 16 tokens, is computed here, where also the first token is
sampled. So sampling, grammars, drafts and parsing need no second process, and a prompt that no process computes is
computed here.
"""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from localllm.disaggregation.connection import PrefillProcess, pieces_of
from localllm.disaggregation.prefill_engine import NO_IDENTITY
from localllm.disaggregation.transport import CANCEL, DONE, PROMPT, SEGMENT, TAKEN, Message
from localllm.metrics import TierMove
from localllm.parallel.channel import FAILED
from localllm.runtime.kv_cache.blocks import OutOfBlocks
from localllm.runtime.kv_cache.lower_tier import NOTHING_TO_LOAD, PrefixLoad
from localllm.runtime.kv_cache.prefix_copy import copy_in, frequencies_digest
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.kv_cache.snapshot import DamagedSnapshot, KVSnapshot, SnapshotTokens
from localllm.runtime.runner import Runner

MAX_LOADS = 64  # sequences of the queue whose prompts are computed elsewhere at once
MAX_LOCAL_TOKENS = 128  # of a prompt that are computed next to the answers: they delay them by less than a chunk
MAX_SURPLUS = 2  # times the tokens that are missing here, up to which a process computes tokens again
MAX_OUTSTANDING_TOKENS = 4096  # that a process is sent, so that it has work, and others get the next prompt
WAIT_S = 0.005  # that an idle engine waits for keys and values before it looks for other requests


@dataclass(eq=False)
class RemotePrompt:
    """A prompt that another process computes, as a PrefixLoad."""

    number: int
    token_ids: list[int]
    scope: str
    pieces: list[int]
    position: int  # blocks that are here
    end: int  # blocks that are wanted
    serial: int  # of the block before `position`
    missing: int  # tokens
    process: PrefillProcess | None = None  # that computes it
    began: float = field(default_factory=time.perf_counter)
    tokens: int = 0  # read from a disk
    computed: int = 0
    done: bool = False


class PrefillTier:
    """Connects a block pool with processes that compute prompts. All methods are called on the engine's thread,
    unless they say otherwise."""

    max_loads = MAX_LOADS
    writes_evicted = False

    def __init__(
        self,
        processes: list[PrefillProcess],
        wanted: int,
        max_local_tokens: int = MAX_LOCAL_TOKENS,
        on_close: Callable[[], object] = lambda: None,
    ):
        """processes: which have loaded the model; wanted: how many there should be; max_local_tokens: of a prompt
        that is computed here; on_close: ends them"""
        self.processes = processes
        self.wanted = wanted
        self.max_local_tokens = max_local_tokens
        self.on_close = on_close
        self.counts = None
        self.move = TierMove()
        self.received = TierMove()  # over networks, from processes that have ended
        self.last_number = 0
        self.queue = deque[RemotePrompt]()  # that no process computes yet
        self.loads: dict[int, RemotePrompt] = {}  # not done, by number
        self.arrived = deque[Callable[[], None]]()  # calls to make on the engine's thread
        self.changed = threading.Condition()  # of `arrived`
        self.connected = {process.number for process in processes}
        self.closed = threading.Event()
        for process in processes:
            threading.Thread(target=self.receive, args=(process,), name="localllm-hand-over", daemon=True).start()

    def attach(self, runner: Runner, pool: BlockPool) -> None:
        """Serve a pool, and no longer the one before."""
        for load in list(self.loads.values()):
            self.give_up(load)
        self.runner, self.pool = runner, pool
        self.frequencies = frequencies_digest(runner)
        pool.lower = self

    @property
    def moves(self) -> dict[str, TierMove]:
        moves = {"prefill_to_decode": self.move}
        received = self.received
        for process in self.processes:
            if process.is_alive:
                received = add_moves(received, process.receiver.received)
        return moves | {"worker_to_host": received} if received.bytes else moves

    @property
    def process_counts(self) -> tuple[int, int]:
        """Number of processes that are connected, and that should be. May be called on any thread."""
        return len(self.connected), self.wanted

    def receive(self, process: PrefillProcess) -> None:
        """Read the messages of a process, and of those that replace it: the body of a thread."""
        current: PrefillProcess | None = process
        while current:
            reason = None
            while message := current.channel.receive():
                if message[0] == FAILED:
                    reason = f"failed: {json.loads(message[1])['message']}"
                    break
                self.arrive(partial(self.handle, current, message))
            current.channel.close()  # also while this engine is idle: a worker is in use until then
            self.connected.discard(current.number)
            self.arrive(partial(self.end, current))
            current = current.address and current.address.connect_again(reason or current.end_reason, self.closed)
            if current and self.closed.is_set():
                return current.channel.close()
            if current:
                self.connected.add(current.number)
                self.arrive(partial(self.replace, current))

    def arrive(self, work: Callable[[], None]) -> None:
        with self.changed:
            self.arrived.append(work)
            self.changed.notify_all()

    # Sending prompts

    def begin_load(self, token_ids: ListLike[int], scope: str) -> PrefixLoad:
        """Have another process compute a prompt, unless few of its tokens are missing here."""
        pool, size = self.pool, self.pool.block_size
        if not self.loads:
            self.read_arrived()  # a process may have come back
        usable = [process for process in self.processes if self.is_usable(process, len(token_ids))]
        end = (len(token_ids) - 1) // size  # blocks; the last token is computed here in any case
        serials, blocks = pool.cached_blocks(token_ids[: end * size], scope)
        missing = (end - pool.reusable_count(serials)) * size
        if not usable or missing <= self.max_local_tokens:
            return NOTHING_TO_LOAD
        pieces = pieces_of(token_ids, scope)
        known = max(process.known_tokens(pieces) for process in usable)
        if end * size - known > MAX_SURPLUS * missing:
            return NOTHING_TO_LOAD
        pool.mark_used(blocks)  # so that others are evicted for what follows them
        position = min(len(serials), end - 1)  # at least one block, with which the recurrent state comes
        if end - position > pool.free_count - pool.unused_count(blocks):
            return NOTHING_TO_LOAD
        serial = serials[position - 1] if position else pool.root_of(scope)
        self.last_number += 1
        load = RemotePrompt(
            self.last_number,
            list(token_ids[:-1]),
            scope,
            pieces,
            position,
            end,
            serial,
            max(0, end * size - known),
        )
        self.loads[load.number] = load
        self.queue.append(load)
        self.dispatch()
        return load

    def is_usable(self, process: PrefillProcess, length: int) -> bool:
        return process.is_alive and process.frequencies == self.frequencies and length - 1 <= process.context

    def dispatch(self) -> None:
        """Send prompts to processes that have little to do, as far as the pool has room for them."""
        while self.queue:
            load = self.queue[0]
            usable = [process for process in self.processes if self.is_usable(process, len(load.token_ids))]
            if not usable:
                self.give_up(load)
                continue
            expected = sum(other.end - other.position for process in self.processes for other in process.loads)
            if expected and expected + load.end - load.position > self.pool.free_count:
                break
            ready = [p for p in usable if not p.loads or p.outstanding_tokens < MAX_OUTSTANDING_TOKENS]
            if not ready:
                break
            process = max(ready, key=lambda each: each.head_start(load.pieces))
            self.queue.popleft()
            self.send(load, process)

    def send(self, load: RemotePrompt, process: PrefillProcess) -> None:
        load.process, load.began = process, time.perf_counter()
        process.loads.append(load)
        process.remember(load.pieces)
        start = load.position * self.pool.block_size
        fields = {"number": load.number, "start": start, "scope": load.scope}
        with contextlib.suppress(OSError):  # it has ended, which `receive` reports
            process.channel.send(PROMPT, Message(fields, load.token_ids).encode())

    def cancel_load(self, load: PrefixLoad) -> None:
        if isinstance(load, RemotePrompt):
            self.give_up(load)

    def give_up(self, load: RemotePrompt) -> None:
        """Expect nothing more of a prompt: what is missing is computed here."""
        process = load.process
        self.finish(load)
        if process and process.is_alive:
            with contextlib.suppress(OSError):
                process.channel.send(CANCEL, Message({"number": load.number}).encode())

    def finish(self, load: RemotePrompt) -> None:
        load.done = True
        self.loads.pop(load.number, None)
        if load in self.queue:
            self.queue.remove(load)
        if load.process:
            load.process.loads.remove(load)
            load.process = None

    # Receiving keys and values

    def install_loaded(self, *, wait_s: float = 0.0) -> bool:
        """Copy what has arrived into the prefix cache, and return whether that took time. wait_s: how long to wait
        for something, if any sequence does"""
        if not self.loads and not self.arrived:
            return False
        took_time = wait_s > 0
        with self.changed:
            if wait_s and not self.arrived:
                self.changed.wait_for(lambda: self.arrived, min(wait_s, WAIT_S))
        took_time |= self.read_arrived()
        self.dispatch()
        return took_time

    def read_arrived(self) -> bool:
        """Handle what has arrived, and return whether there was anything."""
        is_empty = not self.arrived
        while self.arrived:
            self.arrived.popleft()()
        return not is_empty

    def handle(self, process: PrefillProcess, message: tuple[int, bytearray]) -> None:
        """Handle a message of a process."""
        fields = Message.decode(message[1]).fields
        load = self.loads.get(fields["number"])
        if load and load.process is not process:
            load = None  # it was given to another process
        if message[0] == DONE:
            if load:
                load.computed += fields["computed"]
                self.finish(load)
        elif message[0] == SEGMENT:
            if load and not self.install(load, process, fields):
                self.give_up(load)
            with contextlib.suppress(OSError):
                process.channel.send(TAKEN, Message({"slot": fields["location"]["slot"]}).encode())

    def install(self, load: RemotePrompt, process: PrefillProcess, fields: dict[str, Any]) -> bool:
        """Copy a segment into the caches. Returns whether more of the prompt can follow."""
        pool, began = self.pool, time.perf_counter()
        if load.serial > 0 and load.serial not in pool.prefixes:  # evicted meanwhile
            return False
        end = min(fields["end"] // pool.block_size, load.end)
        tokens = SnapshotTokens(NO_IDENTITY, fields["start"], b"", frozenset(fields["states"]))
        states = [length for length in tokens.states if length <= end * pool.block_size]
        try:
            snapshot = KVSnapshot(tokens, process.receiver.get(fields["location"]))
            load.serial, _ = copy_in(
                self.runner, pool, snapshot, load.token_ids, end, load.serial, load.scope, states
            )
        except (OutOfBlocks, DamagedSnapshot):
            return False
        load.position = end
        nbytes, seconds = self.move
        self.move = TierMove(nbytes + fields["location"]["bytes"], seconds + time.perf_counter() - began)
        return True

    def replace(self, process: PrefillProcess) -> None:
        """Replace a process by the one that was restarted with the same number."""
        self.processes = [process if each.number == process.number else each for each in self.processes]

    def end(self, process: PrefillProcess) -> None:
        """Give the prompts of a process that has ended to another, or compute them here."""
        process.is_alive = False
        self.received = add_moves(self.received, process.receiver.received)
        for load in reversed(list(process.loads)):
            if load.position == load.end:
                self.finish(load)
            else:
                load.process = None
                self.queue.appendleft(load)
        process.loads.clear()

    def before_drop(self, serial: int) -> None:
        """Nothing is stored below."""

    def keep(self, serial: int) -> None:
        """Nothing is stored below."""

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Prompts are sent whatever computing them takes."""

    def close(self) -> None:
        """Leave the processes, and end them if they are this engine's."""
        self.closed.set()
        for process in self.processes:
            process.channel.close()
        self.on_close()


def add_moves(one: TierMove, other: TierMove) -> TierMove:
    return TierMove(one.bytes + other.bytes, one.seconds + other.seconds)
