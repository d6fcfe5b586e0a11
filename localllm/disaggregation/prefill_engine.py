"""The side that computes prompts: an engine that hands over the keys and values of prompts and never decodes.

It serves several peers, the processes that answer, which come and go. Their prompts are computed in the order in
which they arrive; as each sends few at a time, none fills the queue. Everything but reading their messages happens
on one thread.
"""

import contextlib
import math
import queue
import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from localllm.disaggregation.tensor_stream import TensorStream
from localllm.disaggregation.transport import CANCEL, DONE, PING, PONG, PROMPT, SEGMENT, TAKEN, Message, Sender
from localllm.metrics import Stopwatch
from localllm.parallel.channel import SETUP, Channel
from localllm.request import Request, SamplingParams
from localllm.runtime.device_errors import is_engine_failure
from localllm.runtime.engine import Engine
from localllm.runtime.kernels.threads import end_openmp_threads
from localllm.runtime.kv_cache.prefix_copy import SEGMENT_BLOCKS, PrefixExport
from localllm.runtime.kv_cache.snapshot import CacheIdentity
from localllm.runtime.sequence import Sequence

ONLY_PROMPT = SamplingParams(max_tokens=0)
HANG_S = 600.0  # that a step may take, as one of a stage on another machine; then pings are not answered any more
NO_IDENTITY = CacheIdentity("", "", "", "", 0, 0, 0, ())  # both processes have the same model


@dataclass(eq=False)
class Peer:
    """A process that answers, whose prompts are computed here."""

    channel: Channel | TensorStream
    sender: Sender
    prompts: dict[int, "Prompt"] = field(default_factory=dict)  # that are not handed over, by number


@dataclass(eq=False)
class Prompt:
    """A prompt of a peer."""

    peer: Peer
    number: int
    start: int  # tokens that the peer has
    sequence: Sequence
    tokens: int  # that were handed over or that the peer has
    export: PrefixExport | None = None  # once it is computed


class PrefillEngine:
    def __init__(self, engine: Engine, context: int):
        """context: maximum tokens of a prompt"""
        self.engine = engine
        self.peers = list[Peer]()
        self.context = context
        self.prompts: dict[Sequence, Prompt] = {}  # that are not computed
        self.exporting: list[Prompt] = []
        self.inbox: queue.SimpleQueue[tuple[Peer, tuple[int, bytearray] | None] | None] = queue.SimpleQueue()
        self.stopped = False
        self.step_began = math.inf  # of `time.monotonic`, while there is a step
        engine.prefer_throughput()

    def run(self) -> None:
        """Compute and hand over prompts until `stop` is called."""
        with torch.inference_mode():
            while not self.stopped:
                self.read_inbox()
                self.step_began = time.monotonic()
                try:
                    self.step()
                except Exception as error:
                    if is_engine_failure(error):
                        raise
                    self.fail_all(error)
                self.hand_over()
                self.report()
                self.step_began = math.inf

    def serve(self, peer: Peer) -> None:
        """Add a peer, and read its messages until it ends: the body of a thread."""
        self.inbox.put((peer, (SETUP, bytearray())))
        while message := peer.channel.receive():
            if message[0] != PING:
                self.inbox.put((peer, message))
            elif time.monotonic() - self.step_began < HANG_S:
                self.send(peer, PONG, Message({}))
        self.inbox.put((peer, None))

    def stop(self) -> None:
        """End `run`, from any thread."""
        self.inbox.put(None)

    def read_inbox(self) -> None:
        """Handle all messages, after waiting for one if there is nothing else to do."""
        can_export = any(prompt.peer.sender.has_room for prompt in self.exporting)
        idle = not self.engine.has_unfinished_requests and not can_export
        if idle and self.inbox.empty():
            end_openmp_threads()  # they would slow down the processes that answer
        with contextlib.suppress(queue.Empty):
            while not self.stopped:
                if received := self.inbox.get(block=idle):
                    self.handle(*received)
                else:
                    self.stopped = True
                idle = False

    def handle(self, peer: Peer, message: tuple[int, bytearray] | None) -> None:
        if message is None:
            self.peers.remove(peer)
            for prompt in list(peer.prompts.values()):
                self.cancel(prompt)
            peer.sender.close()
            peer.channel.close()
            return
        kind = message[0]
        if kind == SETUP:
            self.peers.append(peer)
            return
        fields, token_ids = Message.decode(message[1])
        if kind == PROMPT:
            self.add(peer, fields["number"], fields["start"], list(token_ids), fields["scope"])
        elif kind == CANCEL:
            if prompt := peer.prompts.get(fields["number"]):
                self.cancel(prompt)
        elif kind == TAKEN:
            peer.sender.release(fields)

    def add(self, peer: Peer, number: int, start: int, token_ids: list[int], scope: str) -> None:
        """Enqueue a prompt; one that is too long is answered at once."""
        watch = Stopwatch(self.engine.clock())
        request = Request(tuple(token_ids), ONLY_PROMPT, watch.arrival, cache_scope=scope)
        sequence = Sequence(request, 0, frozenset(), len(token_ids), watch)
        prompt = peer.prompts[number] = Prompt(peer, number, start, sequence, start)
        if len(token_ids) > self.context:
            self.finish(prompt)
            return
        self.prompts[sequence] = prompt
        self.engine.add_sequence(sequence)

    def step(self) -> None:
        """Run a step, and begin to hand over the prompts that it completes."""
        for event in self.engine.step() if self.engine.has_unfinished_requests else ():
            if event.finish_reason and (prompt := self.prompts.pop(event.sequence, None)):
                prompt.export = self.begin_export(prompt, len(prompt.sequence.token_ids))
                self.exporting.append(prompt)

    def begin_export(self, prompt: Prompt, length: int) -> PrefixExport:
        """Return the copies of the first tokens of a prompt, as far as they were not handed over."""
        request = prompt.sequence.request
        return PrefixExport(
            self.engine.runner,
            self.engine.pool,
            NO_IDENTITY,
            request.prompt_ids[:length],
            request.cache_scope,
            start=prompt.tokens,
            only_last_state=True,
        )

    def hand_over(self) -> None:
        """Send one segment of each prompt, as far as there is room: between its steps, unless a recurrent state
        belongs to it."""
        size = SEGMENT_BLOCKS * self.engine.block_size
        for prompt in () if self.engine.pool.recurrent else list(self.prompts.values()):
            known = prompt.sequence.computed // self.engine.block_size * self.engine.block_size
            if known - prompt.tokens >= size and prompt.peer.sender.has_room:
                self.send_segment(prompt, self.begin_export(prompt, known))
        for prompt in list(self.exporting):
            assert prompt.export
            if prompt.peer.sender.has_room and not self.send_segment(prompt, prompt.export):
                self.finish(prompt)

    def send_segment(self, prompt: Prompt, export: PrefixExport) -> bool:
        """Send the next segment of a prompt; returns False if there is none."""
        copied = next(export, None)
        if copied is None:
            return False
        tokens, blocks = copied
        location = prompt.peer.sender.put(blocks.wait())
        prompt.tokens = tokens.end
        fields = {"number": prompt.number, "start": tokens.start, "end": tokens.end, "location": location}
        self.send(prompt.peer, SEGMENT, Message(fields | {"states": sorted(tokens.states)}))
        return True

    def report(self) -> None:
        """Report to each peer what the others have queued, so that it prefers processes with less."""
        left = Counter[Peer]()
        for prompt in self.prompts.values():
            left[prompt.peer] += len(prompt.sequence.token_ids) - prompt.sequence.computed
        for peer in self.peers:
            peer.sender.report(left.total() - left[peer])

    def finish(self, prompt: Prompt) -> None:
        """Report that nothing more of a prompt will come."""
        self.forget(prompt)
        cached = max(prompt.start, prompt.sequence.cached_tokens or 0)
        self.send(
            prompt.peer,
            DONE,
            Message({"number": prompt.number, "computed": max(0, prompt.tokens - cached)}),
        )

    def cancel(self, prompt: Prompt) -> None:
        self.forget(prompt)
        self.engine.cancel(prompt.sequence)

    def forget(self, prompt: Prompt) -> None:
        prompt.peer.prompts.pop(prompt.number, None)
        self.prompts.pop(prompt.sequence, None)
        if prompt in self.exporting:
            self.exporting.remove(prompt)

    def fail_all(self, error: Exception) -> None:
        """Give up all prompts after a failed step, so that their peers compute them."""
        for prompt in [*self.prompts.values(), *self.exporting]:
            self.engine.cancel(prompt.sequence)
            self.finish(prompt)
        self.engine.reset()

    @staticmethod
    def send(peer: Peer, kind: int, message: Message) -> None:
        with contextlib.suppress(OSError):  # the peer has ended, which `receive` reports
            peer.channel.send(kind, message.encode())
