"""A prefill engine in a thread, connected with the engine that answers as if it was in another process."""

import os
import socket
import threading
from dataclasses import dataclass

from localllm.disaggregation.prefill_engine import Peer, PrefillEngine
from localllm.disaggregation.prefill_tier import PrefillProcess, PrefillTier
from localllm.disaggregation.transport import SharedMemory, open_slots
from localllm.parallel.channel import Channel
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.prefix_copy import SEGMENT_BLOCKS, frequencies_digest

CONTEXT = 256
MAX_LOCAL_TOKENS = 16


@dataclass
class PrefillThread:
    """A prefill engine in a thread."""

    engine: Engine
    process: PrefillProcess
    thread: threading.Thread
    channel: Channel  # of the prefill engine

    def kill(self) -> None:
        """End it as if its process had been killed."""
        self.channel.close()

    def close(self) -> None:
        self.process.channel.close()
        self.thread.join(10)
        self.channel.close()


def start_prefill_thread(engine: Engine, number: int = 1) -> PrefillThread:
    states = sum(t[:1].nbytes for cache in engine.runner.recurrent_caches for t in cache.tensors)
    descriptor, slot_bytes = open_slots(SEGMENT_BLOCKS * engine.runner.block_bytes + states)
    own, other = (Channel(connection) for connection in socket.socketpair())
    peer = Peer(other, SharedMemory(descriptor, slot_bytes))
    process = PrefillProcess(number, own, SharedMemory(descriptor, slot_bytes), None)
    os.close(descriptor)
    process.frequencies, process.context = frequencies_digest(engine.runner), CONTEXT
    thread = threading.Thread(target=PrefillEngine(engine, [peer], CONTEXT).run, daemon=True)
    thread.start()
    return PrefillThread(engine, process, thread, other)


def attach(engine: Engine, threads: list[PrefillThread]) -> PrefillTier:
    """Let these threads compute the prompts of an engine."""
    tier = PrefillTier([thread.process for thread in threads], MAX_LOCAL_TOKENS)
    tier.attach(engine.runner, engine.pool)
    return tier
