"""A prefill engine in a thread, connected with the engine that answers as if it was in another process."""

import os
import socket
import threading
from dataclasses import dataclass

from localllm.disaggregation.connection import PrefillProcess
from localllm.disaggregation.prefill_engine import Peer, PrefillEngine
from localllm.disaggregation.prefill_tier import PrefillTier
from localllm.disaggregation.tensor_stream import TensorStream
from localllm.disaggregation.transport import SharedMemory, open_slots
from localllm.parallel.channel import Channel
from localllm.parallel.handshake import EARLY_BYTES, prepare
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.prefix_copy import SEGMENT_BLOCKS, frequencies_digest

CONTEXT = 256
MAX_LOCAL_TOKENS = 16


@dataclass
class PrefillThread:
    """A prefill engine in a thread."""

    engine: Engine
    prefill: PrefillEngine
    process: PrefillProcess  # the connection of the first engine
    thread: threading.Thread
    channels: list[Channel | TensorStream]  # of the prefill engine

    def kill(self) -> None:
        """End it as if its process had been killed."""
        for channel in self.channels:
            channel.close()

    def close(self) -> None:
        self.process.channel.close()
        self.prefill.stop()
        self.thread.join(60)
        self.kill()

    def connect(self) -> PrefillProcess:
        """Return the connection of a further engine."""
        process, channel = connect(self.engine, self.prefill, self.process.number)
        self.channels.append(channel)
        return process


def start_prefill_thread(engine: Engine, number: int = 1, *, over_tcp: bool = False) -> PrefillThread:
    prefill = PrefillEngine(engine, CONTEXT)
    process, channel = (connect_over_tcp if over_tcp else connect)(engine, prefill, number)
    thread = threading.Thread(target=prefill.run, daemon=True)
    thread.start()
    return PrefillThread(engine, prefill, process, thread, [channel])


def connect(engine: Engine, prefill: PrefillEngine, number: int) -> tuple[PrefillProcess, Channel]:
    states = sum(t[:1].nbytes for cache in engine.runner.recurrent_caches for t in cache.tensors)
    descriptor, slot_bytes = open_slots(SEGMENT_BLOCKS * engine.runner.block_bytes + states)
    own, other = (Channel(connection) for connection in socket.socketpair())
    peer = Peer(other, SharedMemory(descriptor, slot_bytes))
    process = PrefillProcess(number, own, SharedMemory(descriptor, slot_bytes))
    os.close(descriptor)
    process.frequencies, process.context = frequencies_digest(engine.runner), CONTEXT
    threading.Thread(target=prefill.serve, args=(peer,), daemon=True).start()
    return process, other


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection between machines."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        prepare(end)
    return near, far


def connect_over_tcp(
    engine: Engine, prefill: PrefillEngine, number: int
) -> tuple[PrefillProcess, Channel | TensorStream]:
    near, far = tcp_pair()
    own, other = TensorStream(Channel(near), 2**26), TensorStream(Channel(far), EARLY_BYTES + 4 * CONTEXT)
    process = PrefillProcess(number, own, own)
    process.frequencies, process.context = frequencies_digest(engine.runner), CONTEXT
    threading.Thread(target=prefill.serve, args=(Peer(other, other),), daemon=True).start()
    return process, other


def attach(engine: Engine, processes: list[PrefillProcess]) -> PrefillTier:
    """Let these processes compute the prompts of an engine."""
    tier = PrefillTier(processes, len(processes), MAX_LOCAL_TOKENS)
    tier.attach(engine.runner, engine.pool)
    return tier
